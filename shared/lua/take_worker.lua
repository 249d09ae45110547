-- Fenced: a shard takes a worker that is free, its own, or of a shard without a lease; and lets go of the one before.
-- KEYS: lease, worker, epoch, the worker that the shard had (the same again: none)   ARGV: epoch, shard, key prefix
-- Returns the epoch of the Run that may begin there, or 0. Each Run has a new one: workers go from shard to shard, and
-- refuse an epoch that is smaller than one they have seen.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local record = redis.call('HMGET', KEYS[2], 'ready', 'shard')
if record[1] ~= '1' then return 0 end
local shard = record[2]
if shard and shard ~= ARGV[2] and redis.call('EXISTS', ARGV[3] .. 'lease:' .. shard) == 1 then return 0 end
if KEYS[4] ~= KEYS[2] and redis.call('HGET', KEYS[4], 'shard') == ARGV[2] then
  redis.call('HDEL', KEYS[4], 'shard', 'run')
end
local run = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[2], 'shard', ARGV[2], 'run', run)
return run
