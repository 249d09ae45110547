-- Fenced: deletes the entry of a request that no shard will run: an unreadable one, or that of a request that is gone or
-- has ended. An entry with the highest id keeps its stream from taking others. It is deleted too; a request in it that
-- waits comes back with another id.
-- KEYS: lease, queue   ARGV: text of the lease, group, stream, entry, req key of an entry with the highest id or ''
-- Returns 1 if the request came back, 2 if it waits and the stream has no id for it, else 0.
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

-- Sets back a stream behind its entry with the highest id.
local function free(queue, stream, group, req)
  if #redis.call('XRANGE', stream, HIGHEST, HIGHEST) == 0 then return 0 end
  local fields = read_entry(stream, HIGHEST)
  local grammar = fields.grammar
  if grammar ~= '' then count(queue .. ':grammars', 'requests:' .. grammar, 1) end  -- its text stays meanwhile
  delete_entry(queue, stream, group, HIGHEST)
  set_back_with_group(stream, group)
  local record = req ~= '' and redis.call('HMGET', req, 'state', 'entry') or {}
  local waits, entry = record[1] == 'queued' and record[2] == HIGHEST and fields.r, nil
  if waits then
    entry = add_entry(queue, stream, fields, '')
    if entry == HIGHEST then  -- the one before it has not ended
      delete_entry(queue, stream, group, entry)
      set_back_with_group(stream, group)
      entry = nil
    end
  end
  if grammar ~= '' then drop_grammar(queue, fields.tenant, grammar) end
  if entry then redis.call('HSET', req, 'entry', entry) end
  return entry and 1 or waits and 2 or 0
end

local queue, group, stream, entry = KEYS[2], ARGV[2], ARGV[3], ARGV[4]
if entry == HIGHEST then return free(queue, stream, group, ARGV[5]) end
local fields = read_entry(stream, entry)
local waits = is_waiting(queue, entry, fields)
delete_entry(queue, stream, group, entry)
-- What was deleted before, or lost by Redis together with its entry, does not wait.
if waits then leave_queue(queue, fields.tokens, string.match(stream, '[^:]*$'), fields.tenant) end
return 0
