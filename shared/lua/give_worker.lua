-- Fenced: a shard lets go of a worker, if it still has it by that Run: whoever took it meanwhile keeps it.
-- KEYS: lease, worker   ARGV: epoch, shard, epoch of the Run
-- Returns 1, or 0 where the worker is another's or was taken again.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local record = redis.call('HMGET', KEYS[2], 'shard', 'run')
if record[1] ~= ARGV[2] or (record[2] or '0') ~= ARGV[3] then return 0 end
redis.call('HDEL', KEYS[2], 'shard', 'run')
return 1
