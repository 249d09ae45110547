-- Fenced: marks the requests that XREADGROUP gave to this shard as claimed by it.
-- KEYS: lease   ARGV: text of the lease, shard, then req keys
-- Returns per request: verdict, time of its enqueueing (ms of Redis's clock), the gateway that delivers it now, and
-- whether that gateway has a heartbeat (1 or 0).
-- Verdicts: 0 run it, 1 cancelled before the claim, 2 unknown (its record has expired), 3 already finished
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local beat = string.sub(KEYS[1], 1, #KEYS[1] - #('lease:' .. ARGV[2])) .. 'alive:gateway:'
local verdicts = {}
for i = 3, #ARGV do
  local record = redis.call('HMGET', ARGV[i], 'state', 'cancelled', 'enqueued_ms', 'gateway')
  local verdict = 0
  if not record[1] then
    verdict = 2
  elseif record[1] == 'finished' then
    verdict = 3
  else
    if record[2] then verdict = 1 end
    redis.call('HSET', ARGV[i], 'shard', ARGV[2], 'epoch', string.match(ARGV[1], '^%d+'))
    if record[1] == 'queued' then redis.call('HSET', ARGV[i], 'state', 'claimed') end
    count(ARGV[i], 'attempts', 1)
  end
  verdicts[#verdicts + 1] = verdict
  verdicts[#verdicts + 1] = whole(record[3], 0)
  verdicts[#verdicts + 1] = record[4] or ''
  verdicts[#verdicts + 1] = redis.call('EXISTS', beat .. (record[4] or ''))
end
return verdicts
