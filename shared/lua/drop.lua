-- Fenced: deletes entries of requests that no shard will run: unreadable ones, and those of requests that have ended.
-- An entry with the highest id keeps its stream from taking others. It is deleted too; a request in it that waits comes
-- back with another id.
-- KEYS: lease, queue   ARGV: text of the lease, group, then (stream, entry, prompt tokens that leave the queue with the
--       entry, class, tenant, req key of an entry with the highest id or '') each
-- Returns the number of requests that came back.
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

-- Sets back a stream behind its entry with the highest id; returns whether the request in it came back.
local function free(queue, stream, group, req)
  local row = redis.call('XRANGE', stream, HIGHEST, HIGHEST)[1]
  if not row then return false end
  local tenant, bytes, kept, grammar = read_entry(stream, HIGHEST)
  if grammar ~= '' then count(queue .. ':grammars', 'requests:' .. grammar, 1) end  -- its text stays meanwhile
  delete_entry(queue, stream, group, HIGHEST)
  set_back_with_group(stream, group)
  local record = req ~= '' and redis.call('HMGET', req, 'state', 'entry') or {}
  local entry
  if record[1] == 'queued' and record[2] == HIGHEST and row[2][1] == 'r' then
    entry = add_entry(queue, stream, row[2][2], tenant, bytes, kept, grammar, '')
    if entry == HIGHEST then  -- the one before it has not ended
      delete_entry(queue, stream, group, entry)
      set_back_with_group(stream, group)
      entry = nil
    end
  end
  if grammar ~= '' then drop_grammar(queue, tenant, grammar) end
  if entry then redis.call('HSET', req, 'entry', entry) end
  return entry
end

local returned = 0
for i = 3, #ARGV, 6 do
  if ARGV[i + 1] == HIGHEST then
    if free(KEYS[2], ARGV[i], ARGV[2], ARGV[i + 5]) then returned = returned + 1 end
  else
    local _, _, existed = delete_entry(KEYS[2], ARGV[i], ARGV[2], ARGV[i + 1])
    -- What was deleted before, or lost by Redis together with its entry, is not counted any more.
    if existed and whole(ARGV[i + 2], 0) > 0 then leave_queue(KEYS[2], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) end
  end
end
return returned
