-- Fenced: deletes entries of requests that no shard will run: unreadable ones, and those of requests that have ended.
-- KEYS: lease, queue   ARGV: epoch, group, then (stream, entry) each
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
for i = 3, #ARGV, 2 do delete_entry(KEYS[2], ARGV[i], ARGV[2], ARGV[i + 1]) end
return 1
