-- Fenced: a shard takes a worker that is free, already its own, or of a shard without a lease, and gives up its previous
-- one.
-- KEYS: lease, worker, epoch, the previous worker (the same key if there is none)   ARGV: text of the lease, shard,
-- key prefix, least epoch of the new Run
-- Returns the epoch of the new Run, or 0. Each Run has a new epoch: workers move between shards, and refuse a smaller
-- epoch than they have seen.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local record = redis.call('HMGET', KEYS[2], 'ready', 'shard')
if record[1] ~= '1' then return 0 end
local shard = record[2]
if shard and shard ~= ARGV[2] and redis.call('EXISTS', ARGV[3] .. 'lease:' .. shard) == 1 then return 0 end
if KEYS[4] ~= KEYS[2] and redis.call('HGET', KEYS[4], 'shard') == ARGV[2] then
  redis.call('HDEL', KEYS[4], 'shard', 'run')
end
-- A worker has seen more than the counter where Redis lost it and its clock was set back.
local run = next_epoch(KEYS[3], tonumber(ARGV[4]))
redis.call('HSET', KEYS[2], 'shard', ARGV[2], 'run', run)
return tonumber(run)
