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
-- that no service wrote begins anew long before the bound of epochs, 2^40, behind which workers would refuse every Run.
local COUNTED_EPOCHS = 824633720832  -- 3 * 2^38, as in keys.py
local function next_epoch(counter, least)
  local time = redis.call('TIME')
  local now = 100 * time[1] + math.floor(time[2] / 10000)
  local counted = redis.pcall('INCR', counter)
  if type(counted) == 'table' or counted >= COUNTED_EPOCHS then counted = 1 end
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

-- About what Redis needs for the record of a request that has ended, without its delivery.
local RECORD_BYTES = 1536
local SECOND_ROWS = 16  -- of one second, among which that of a tenant is looked for

-- Counts bytes of a tenant that stay in Redis behind the end of a request, until `count_expired`. The requests of a tenant
-- that end within a second of Redis's clock share a row, so that `recount` can read the rows of a busy queue.
local function count_kept(queue, tenant, bytes, now)
  local kept, added = queue .. ':kept', bytes
  local second = now - now % 1000
  local first, last = string.format('%.0f', second), string.format('%.0f', second + 999)
  for _, row in ipairs(redis.call('XRANGE', kept, first, last, 'COUNT', SECOND_ROWS)) do
    local fields = row[2]
    if fields[1] == 'tenant' and fields[2] == tenant and fields[3] == 'bytes' then
      bytes = bytes + math.max(0, whole(fields[4], 0))
      redis.call('XDEL', kept, row[1])
    end
  end
  append(kept, '*', 'tenant', tenant, 'bytes', string.format('%.0f', bytes))
  count_bytes(queue, tenant, added)
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

-- Returns what the entry of a request carries: `r`, the request; `id`, its id; what was counted with it: `tenant`, `tokens`,
-- `bytes`, the part `kept` of them that stays behind the end, and `grammar`, the name of its grammar if the text lies apart.
-- Of a deleted entry it is nothing.
local MAX_OF_ENTRY = 1099511627776  -- 2^40; sums over thousands of entries stay below 2^53
local function entry_fields(words)
  local fields = {}
  for i = 1, #words, 2 do fields[words[i]] = words[i + 1] end
  for _, name in ipairs({'tokens', 'bytes', 'kept'}) do
    fields[name] = math.min(MAX_OF_ENTRY, math.max(0, whole(fields[name], 0)))
  end
  fields.tenant, fields.grammar = fields.tenant or '', fields.grammar or ''
  return fields
end

local function read_entry(stream, entry)
  local row = redis.call('XRANGE', stream, entry, entry)[1]
  return entry_fields(row and row[2] or {})
end

-- Adds a request to its stream and counts its bytes; returns the id of the entry. The entry carries what is counted, so
-- that the same is counted back. fields: as of `entry_fields`. text: of its grammar; '' where Redis has it.
local function add_entry(queue, stream, fields, text)
  local tenant, bytes, grammar = fields.tenant, fields.bytes, fields.grammar
  local words = {'r', fields.r, 'tenant', tenant, 'bytes', bytes, 'kept', fields.kept, 'tokens', fields.tokens}
  if fields.id then words[#words + 1], words[#words + 2] = 'id', fields.id end
  if grammar ~= '' then
    words[#words + 1], words[#words + 2] = 'grammar', grammar
    add_grammar(queue, tenant, grammar, text)
  end
  count_bytes(queue, tenant, bytes)
  local added = redis.pcall('XADD', stream, '*', unpack(words))
  if type(added) ~= 'table' then return added end
  if grammar ~= '' then drop_grammar(queue, tenant, grammar) end
  count_bytes(queue, tenant, -bytes)
  return redis.call('XADD', stream, '*', unpack(words))  -- raises the same error
end

-- Acknowledges and deletes the entry of a request and counts back the bytes that it carries, once. Returns its fields.
local function delete_entry(queue, stream, group, entry)
  local fields = read_entry(stream, entry)
  count_bytes(queue, fields.tenant, -fields.bytes)
  if fields.grammar ~= '' then drop_grammar(queue, fields.tenant, fields.grammar) end
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
  return fields
end

local function prefix_of(queue) return string.sub(queue, 1, -#'queue' - 1) end

-- Returns whether the request of an entry is counted as waiting: from its enqueueing to its first step or its end. One of
-- which the record is gone waits until its entry is dropped.
local function is_waiting(queue, entry, fields)
  if not fields.id then return false end
  local record = redis.pcall('HMGET', prefix_of(queue) .. 'req:' .. fields.id, 'state', 'started_ms', 'entry')
  if not record[1] then return true end
  return record[1] ~= 'finished' and not record[2] and record[3] == entry
end

-- Makes a hash hold these counts; returns whether another one than they, or 0, was in it.
local function write_counts(key, counts)
  local held, seen, wrong = redis.pcall('HGETALL', key), {}, false
  if held.err then redis.call('DEL', key) end
  for i = 1, #held, 2 do
    local field, expected = held[i], string.format('%.0f', counts[held[i]] or 0)
    seen[field] = true
    wrong = wrong or held[i + 1] ~= expected
    if not counts[field] then
      redis.call('HDEL', key, field)
    elseif held[i + 1] ~= expected then
      redis.call('HSET', key, field, expected)
    end
  end
  for field, number in pairs(counts) do
    if number > 0 and not seen[field] then
      wrong = true
      redis.call('HSET', key, field, string.format('%.0f', number))
    end
  end
  return wrong
end

-- Makes `queue:grammars` hold the grammars of entries. requests: entries by grammar; sizes: bytes of its text. Returns
-- whether something else was there.
local function write_grammars(queue, requests, sizes)
  local key, wrong = queue .. ':grammars', false
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if not requests[string.match(field, '^%a+:(.*)$') or ''] then
      wrong = true
      redis.call('HDEL', key, field)
    end
  end
  for grammar, number in pairs(requests) do
    local size = sizes[grammar] > 0 and sizes[grammar] or nil
    local counts = {['requests:' .. grammar] = number, ['bytes:' .. grammar] = size}
    for _, name in ipairs({'requests:', 'bytes:'}) do
      local field = name .. grammar
      local text = counts[field] and string.format('%.0f', counts[field]) or false
      if redis.call('HGET', key, field) ~= text then
        wrong = true
        if text then redis.call('HSET', key, field, text) else redis.call('HDEL', key, field) end
      end
    end
  end
  return wrong
end

local RECOUNT_PAGE = 16  -- entries
local RECOUNT_BYTES = 33554432  -- of entries and grammars, that one call reads

-- Calls `visit` with id and fields of each entry of a stream. Returns what is left of `budget`, bytes of entries; below 0
-- there are more entries.
local function each_entry(stream, budget, visit)
  local first = '-'
  while true do
    local rows = redis.call('XRANGE', stream, first, '+', 'COUNT', RECOUNT_PAGE)
    for _, row in ipairs(rows) do
      for _, word in ipairs(row[2]) do budget = budget - #word end
      visit(row[1], entry_fields(row[2]))
    end
    if budget < 0 or #rows < RECOUNT_PAGE or rows[#rows][1] == HIGHEST then return budget end
    first = '(' .. rows[#rows][1]
  end
end

-- Counts the queue anew, by the entries that are there: a stream or a record that was deleted leaves its counts, and no
-- service may have written them. Does nothing where there are more entries than `most`, and leaves the bytes where
-- `queue:kept` has more rows than `most_kept`, or without it than `most` leaves. Returns 1 if a count was wrong, else 0.
local function recount(queue, most, most_kept)
  local streams, entries = {}, 0
  for _, class in ipairs({'realtime', 'high', 'normal', 'low'}) do
    streams[class] = prefix_of(queue) .. 'requests:' .. class
    entries = entries + redis.call('XLEN', streams[class])
    if entries > most then return 0 end
  end
  local counts, tenants, bytes, grammars, owners = {tokens = 0, requests = 0, bytes = 0}, {}, {}, {}, {}
  local function add(totals, name, number)
    if number > 0 then totals[name] = (totals[name] or 0) + number end
  end
  local budget = RECOUNT_BYTES
  for class, stream in pairs(streams) do
    counts['tokens:' .. class] = 0
    budget = each_entry(stream, budget, function(entry, fields)
      add(bytes, fields.tenant, fields.bytes)
      if fields.grammar ~= '' then
        add(grammars, fields.grammar, 1)
        owners[fields.grammar] = fields.tenant
      end
      if is_waiting(queue, entry, fields) then
        add(counts, 'requests', 1)
        add(counts, 'tokens', fields.tokens)
        add(counts, 'tokens:' .. class, fields.tokens)
        add(tenants, fields.tenant, fields.tokens)
      end
    end)
    if budget < 0 then return 0 end
  end
  local sizes = {}
  for grammar, tenant in pairs(owners) do
    sizes[grammar] = #(redis.call('HGET', queue .. ':grammars', 'text:' .. grammar) or '')
    add(bytes, tenant, sizes[grammar])
    budget = budget - sizes[grammar]
    if budget < 0 then return 0 end
  end
  local are_bytes_known = redis.call('XLEN', queue .. ':kept') <= (most_kept or most - entries)
  if are_bytes_known then
    local function add_kept(_, fields) add(bytes, fields.tenant, fields.bytes) end
    are_bytes_known = each_entry(queue .. ':kept', budget, add_kept) >= 0
  end
  local wrong = write_grammars(queue, grammars, sizes)
  if are_bytes_known then
    for _, number in pairs(bytes) do counts.bytes = counts.bytes + number end
    wrong = write_counts(queue .. ':bytes', bytes) or wrong
  else
    counts.bytes = math.max(0, whole(redis.call('HGET', queue, 'bytes'), 0))
  end
  wrong = write_counts(queue .. ':tenants', tenants) or wrong
  return (write_counts(queue, counts) or wrong) and 1 or 0
end
