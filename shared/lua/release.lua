-- Fenced: returns requests that never started to the queue, for any shard.
-- KEYS: lease, queue   ARGV: text of the lease, group, then (req key, stream, entry, request) per request
-- Returns the number of returned requests; the rest have started, or were returned before.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local returned = 0
for i = 3, #ARGV, 4 do
  local record = redis.call('HMGET', ARGV[i], 'state', 'entry', 'tokens', 'tenant')
  -- A request that was read and not yet claimed is still `queued`; its entry is pending.
  if (record[1] == 'claimed' or record[1] == 'queued') and record[2] == ARGV[i + 2] then
    -- The new entry comes first: the text of a grammar goes with the last entry that names it.
    local fields = read_entry(ARGV[i + 1], ARGV[i + 2])
    fields.r = ARGV[i + 3]
    if not fields.id then  -- the entry is lost, or an older gateway wrote it
      fields.id = string.sub(ARGV[i], #prefix_of(KEYS[2]) + #'req:' + 1)
      fields.tokens, fields.tenant = math.max(0, whole(record[3], 0)), record[4] or ''
    end
    local entry = add_entry(KEYS[2], ARGV[i + 1], fields, '')
    delete_entry(KEYS[2], ARGV[i + 1], ARGV[2], ARGV[i + 2])
    redis.call('HSET', ARGV[i], 'state', 'queued', 'entry', entry)
    redis.call('HDEL', ARGV[i], 'shard', 'epoch')
    returned = returned + 1
  end
end
return returned
