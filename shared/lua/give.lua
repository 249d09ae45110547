-- Fenced: moves requests of one shard into the pending list of another, which continues them.
-- KEYS: lease of the first shard, queue   ARGV: text of the lease, group, first shard, second shard,
--       then (req key, stream, entry) each
-- Returns the number of moved requests. A repeated call moves no request that has changed since.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local given = 0
for i = 5, #ARGV, 3 do
  local key, stream, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = redis.call('HMGET', key, 'state', 'shard', 'entry')
  if not record[1] or record[1] == 'finished' then
    delete_entry(KEYS[2], stream, ARGV[2], entry)
  elseif record[2] == ARGV[3] and record[3] == entry then
    redis.call('XCLAIM', stream, ARGV[2], ARGV[4], 0, entry, 'JUSTID')
    redis.call('HSET', key, 'shard', ARGV[4])
    given = given + 1
  end
end
return given
