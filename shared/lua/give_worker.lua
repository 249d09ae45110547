-- Fenced: a shard gives up a worker if it still holds it by that Run; a shard that took it meanwhile keeps it.
-- KEYS: lease, worker   ARGV: text of the lease, shard, epoch of the Run
-- Returns 1, or 0 if another shard has the worker or it was taken again.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local record = redis.call('HMGET', KEYS[2], 'shard', 'run')
if record[1] ~= ARGV[2] or (record[2] or '0') ~= ARGV[3] then return 0 end
redis.call('HDEL', KEYS[2], 'shard', 'run')
return 1
