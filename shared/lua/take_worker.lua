-- Fenced: a shard takes a worker that is free, its own, or of a shard without a lease.
-- KEYS: lease, worker   ARGV: epoch, shard, key prefix
-- Returns 1 or 0.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local shard = redis.call('HGET', KEYS[2], 'shard')
if shard and shard ~= ARGV[2] and redis.call('EXISTS', ARGV[3] .. 'lease:' .. shard) == 1 then return 0 end
redis.call('HSET', KEYS[2], 'shard', ARGV[2])
return 1
