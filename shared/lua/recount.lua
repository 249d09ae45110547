-- Fenced: counts the queue anew, by the entries that are there, unless there are very many.
-- KEYS: lease, queue   ARGV: text of the lease, most entries
-- Returns 1 if a count was wrong, else 0.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
return recount(KEYS[2], tonumber(ARGV[2]))
