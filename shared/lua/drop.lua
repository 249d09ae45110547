-- Fenced: deletes entries of requests that no shard will run: unreadable ones, and those of requests that have ended.
-- KEYS: lease, queue   ARGV: text of the lease, group, then (stream, entry, prompt tokens that leave the queue with the
--       entry, class, tenant) each
-- Sets back a stream of which the group has read all entries.
local function set_back_with_group(stream, group)
  local count = redis.call('XPENDING', stream, group)[1]
  local pending = count > 0 and redis.call('XPENDING', stream, group, '-', '+', count) or {}
  redis.call('XGROUP', 'CREATE', stream, group, set_back(stream, true), 'MKSTREAM')
  for _, row in ipairs(pending) do
    redis.call('XCLAIM', stream, group, row[2], 0, row[1], 'IDLE', row[3], 'RETRYCOUNT', row[4], 'FORCE', 'JUSTID')
  end
end

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
for i = 3, #ARGV, 5 do
  local _, _, existed = delete_entry(KEYS[2], ARGV[i], ARGV[2], ARGV[i + 1])
  -- What was deleted before, or lost by Redis together with its entry, is not counted any more.
  if existed and whole(ARGV[i + 2], 0) > 0 then leave_queue(KEYS[2], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) end
  if existed and ARGV[i + 1] == HIGHEST then set_back_with_group(ARGV[i], ARGV[2]) end
end
return 1
