-- What several scripts use; `source` of redis_client.py puts it in front of each script.
-- Returns a whole number below 2^53, or `default` for any other text.
local function whole(text, default)
  local number = tonumber(text or nil)
  if number and number == math.floor(number) and math.abs(number) < 9007199254740992 then return number end
  return default
end

-- Returns a number below 10^15, or `default` for any other text.
local function real(text, default)
  local number = tonumber(text or nil)
  if number and number == number and math.abs(number) < 1e15 then return number end
  return default
end

-- Adds to a counter in a hash and returns it. One that is not a whole number, or below 0, is wrong: it starts anew.
local function count(key, field, delta)
  local held = redis.pcall('HINCRBY', key, field, delta)
  if type(held) == 'table' or held < 0 then
    held = math.max(0, delta)
    redis.call('HSET', key, field, held)
  end
  return held
end

local LAST_MS = '18446744073709551615'
local HIGHEST = LAST_MS .. '-' .. LAST_MS

-- Rewrites a stream that takes no further entry because an id is the highest possible, or close to it. XSETID does not
-- help: Valkey 9 sets no stream below a deleted entry. The groups of the stream are lost.
-- Without a group, entries of the last possible millisecond get ids of now. With a group, entries keep their ids, and the
-- entry with the highest id is deleted. Returns the last id.
local function set_back(stream, has_group)
  if has_group then redis.call('XDEL', stream, HIGHEST) end
  local rows, last = redis.call('XRANGE', stream, '-', '+'), '0-0'
  redis.call('DEL', stream)
  for _, row in ipairs(rows) do
    local id = row[1]
    if not has_group and string.find(id, LAST_MS .. '-', 1, true) == 1 then id = '*' end
    if #row[2] < 1000 then last = redis.call('XADD', stream, id, unpack(row[2])) end  -- no service writes as many fields
  end
  return last
end

-- Appends to a stream, also behind an entry of the highest id.
local function append(stream, ...)
  local added = redis.pcall('XADD', stream, ...)
  if type(added) ~= 'table' then return added end
  if string.find(added.err, 'last possible ID', 1, true) then set_back(stream) end
  return redis.call('XADD', stream, ...)
end

-- Returns the next epoch, as text: above the counter, at least `least`, and at least Redis's clock in hundredths of a
-- second. By the clock a Redis that lost its last writes, or all, never repeats an epoch that a service has seen. A counter
-- that no service wrote begins anew: epochs are below 2^40.
local function next_epoch(counter, least)
  local time = redis.call('TIME')
  local now = 100 * time[1] + math.floor(time[2] / 10000)
  local counted = redis.pcall('INCR', counter)
  if type(counted) == 'table' or counted >= 1099511627776 then counted = 1 end
  local epoch = string.format('%.0f', math.max(counted, now, least))
  redis.call('SET', counter, epoch)
  return epoch
end

-- Counts bytes of a tenant's requests that have not ended, in total and by tenant.
local function count_bytes(queue, tenant, bytes)
  if bytes == 0 then return end
  local tenants = queue .. ':bytes'
  if count(tenants, tenant, bytes) <= 0 then redis.call('HDEL', tenants, tenant) end
  count(queue, 'bytes', bytes)
end

-- Counts a request that waits no more.
local function leave_queue(queue, tokens, class, tenant)
  tokens, class, tenant = whole(tokens, 0), class or '', tenant or ''
  count(queue, 'tokens', -tokens)
  count(queue, 'requests', -1)
  count(queue, 'tokens:' .. class, -tokens)
  local tenants = queue .. ':tenants'
  if count(tenants, tenant, -tokens) <= 0 then redis.call('HDEL', tenants, tenant) end
end

-- Counts bytes of a tenant that stay in Redis behind the end of a request, until `count_expired`.
local function count_kept(queue, tenant, bytes)
  local kept = queue .. ':kept'
  count_bytes(queue, tenant, bytes)
  append(kept, '*', 'tenant', tenant, 'bytes', bytes)
end

local KEPT_ROWS = 256  -- that one call counts back

-- Counts back what has been kept since `before`, in ms of Redis's clock, or longer, and what is from `after` or later: no
-- service wrote that, or one did behind such an entry or before the clock was set back.
local function count_expired(queue, before, after)
  local kept = queue .. ':kept'
  local function count_back(first, last)
    local rows = redis.call('XRANGE', kept, first, last, 'COUNT', KEPT_ROWS)
    for _, row in ipairs(rows) do
      count_bytes(queue, row[2][2], -math.max(0, whole(row[2][4], 0)))
      redis.call('XDEL', kept, row[1])
    end
    return #rows
  end
  count_back('-', string.format('%.0f', math.max(0, before)))
  local future = count_back(string.format('%.0f', after), '+')
  if future > 0 and future < KEPT_ROWS then set_back(kept) end
end

-- Returns the bytes that were counted for a grammar; nil where none were.
local function grammar_bytes(queue, grammar)
  return whole(redis.call('HGET', queue .. ':grammars', 'bytes:' .. grammar))
end

-- Counts one more request with a grammar. Its text lies in Redis once, however many requests have it, and its bytes are
-- counted once. text: '' of a request that came back; another text takes the place of one that no gateway wrote.
local function add_grammar(queue, tenant, grammar, text)
  local grammars = queue .. ':grammars'
  count(grammars, 'requests:' .. grammar, 1)
  if text == '' then return end
  if redis.call('HGET', grammars, 'text:' .. grammar) ~= text then redis.call('HSET', grammars, 'text:' .. grammar, text) end
  if not grammar_bytes(queue, grammar) then
    redis.call('HSET', grammars, 'bytes:' .. grammar, #text)
    count_bytes(queue, tenant, #text)
  end
end

-- Counts one request less with a grammar; the text goes with the last one.
local function drop_grammar(queue, tenant, grammar)
  local grammars = queue .. ':grammars'
  if count(grammars, 'requests:' .. grammar, -1) > 0 then return end
  count_bytes(queue, tenant, -math.max(0, grammar_bytes(queue, grammar) or 0))
  redis.call('HDEL', grammars, 'requests:' .. grammar, 'text:' .. grammar, 'bytes:' .. grammar)
end

-- Adds a request to its stream and counts its bytes; returns the id of the entry. The entry carries what was counted, so
-- that `delete_entry` counts the same back, the part of it that is kept behind the end, and the name of the grammar if
-- its text lies apart. text: of that grammar; '' where Redis has it.
local function add_entry(queue, stream, request, tenant, bytes, kept, grammar, text)
  local fields = {'r', request, 'tenant', tenant, 'bytes', bytes, 'kept', kept}
  if grammar ~= '' then
    fields[9], fields[10] = 'grammar', grammar
    add_grammar(queue, tenant, grammar, text)
  end
  count_bytes(queue, tenant, bytes)
  local added = redis.pcall('XADD', stream, '*', unpack(fields))
  if type(added) ~= 'table' then return added end
  if grammar ~= '' then drop_grammar(queue, tenant, grammar) end
  count_bytes(queue, tenant, -bytes)
  return redis.call('XADD', stream, '*', unpack(fields))  -- raises the same error
end

-- Returns what the entry of a request carries: tenant, bytes, the part of them that is kept, name of its grammar. Of a
-- deleted entry it is nothing.
local function read_entry(stream, entry)
  local fields = {}
  for _, row in ipairs(redis.call('XRANGE', stream, entry, entry)) do
    for i = 1, #row[2], 2 do fields[row[2][i]] = row[2][i + 1] end
  end
  local bytes, kept = math.max(0, whole(fields.bytes, 0)), math.max(0, whole(fields.kept, 0))
  return fields.tenant or '', bytes, kept, fields.grammar or ''
end

-- Acknowledges and deletes the entry of a request and counts back what it carries, once. Returns tenant, the bytes that
-- are kept, and whether the entry was there.
local function delete_entry(queue, stream, group, entry)
  local tenant, bytes, kept, grammar = read_entry(stream, entry)
  count_bytes(queue, tenant, -bytes)
  if grammar ~= '' then drop_grammar(queue, tenant, grammar) end
  redis.call('XACK', stream, group, entry)
  return tenant, kept, redis.call('XDEL', stream, entry) == 1
end
