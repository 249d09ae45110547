-- Fenced: marks requests that XREADGROUP gave to this shard as its own.
-- KEYS: lease   ARGV: epoch, shard, then req key per request
-- Returns one number a request: 0 go on, 1 cancelled before the claim, 2 unknown (its record has expired), 3 finished already
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local verdicts = {}
for i = 3, #ARGV do
  local record = redis.call('HMGET', ARGV[i], 'state', 'cancelled')
  local verdict = 0
  if not record[1] then
    verdict = 2
  elseif record[1] == 'finished' then
    verdict = 3
  else
    if record[2] then verdict = 1 end
    redis.call('HSET', ARGV[i], 'state', 'claimed', 'shard', ARGV[2], 'epoch', ARGV[1])
    redis.call('HINCRBY', ARGV[i], 'attempts', 1)
  end
  verdicts[#verdicts + 1] = verdict
end
return verdicts
