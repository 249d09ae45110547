-- Fenced: runs simple writes one after another.
-- KEYS: lease, then every written key   ARGV: text of the lease, then each command as the number of its words and the words
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local at = 2
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  if ARGV[at + 1] == 'XADD' then
    append(unpack(ARGV, at + 2, at + words))
  else
    redis.call(unpack(ARGV, at + 1, at + words))
  end
  at = at + 1 + words
end
return 1
