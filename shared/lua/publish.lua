-- Fenced: writes all results of one iteration in one script.
-- KEYS: lease, queue
-- ARGV: text of the lease, key prefix, group, ttl ms of live records, ttl ms of finished ones, time span of token streams
--       in ms,
--       1 if a request with a record that lacks tokens is to end as an error, then five sections, each a count and its rows:
--       entries (gateway, payload), checkpoints (id, choice, byte offset, tokens, finish or 0, tokens at the end),
--       started (id),
--       ended (id, stream, entry, finish of each choice, prompt tokens, tokens of each choice, error),
--       logprobs (id, choice, byte offset, records); and, only where there are any, a sixth:
--       log-probabilities of prompts (id, prompt, byte offset, records), and a seventh: numerics (id, text) of the workers that compute it
-- Returns id and choice of each output record that is too short for what was to be written behind it, as after the loss of
-- Redis's last writes. Nothing is written there, and a request with such a record does not end: the caller writes all
-- tokens and calls again.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local prefix, group, live, kept = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local give_up = ARGV[7] == '1'
local KEY_BYTES = 256  -- about what Redis needs for a choice, or a record of figures, beside its value
local FUTURE_ROWS = 10000  -- of a stream of tokens that has ids of the future
local short = {}
local at = 7
local function arg()
  at = at + 1
  return ARGV[at]
end

-- A stop string ends a sequence before its last tokens: cut the record there.
local function trim(out, length)
  if redis.call('STRLEN', out) > 4 * length then
    redis.call('SET', out, length == 0 and '' or redis.call('GETRANGE', out, 0, 4 * length - 1))
  end
end

for _ = 1, tonumber(arg()) do
  local key = prefix .. 'tokens:' .. arg()
  local added = append(key, 'MINID', '~', math.max(0, now - tonumber(ARGV[6])), '*', 'b', arg())
  -- Behind an entry of the future, as after the clock was set back, all ids are of the future: none would be trimmed.
  if tonumber(string.match(added, '^%d+')) > now then redis.call('XTRIM', key, 'MAXLEN', '~', FUTURE_ROWS) end
  redis.call('PEXPIRE', key, kept)
end

for _ = 1, tonumber(arg()) do
  local id, choice, offset, tokens, finish, length = arg(), arg(), arg(), arg(), arg(), tonumber(arg())
  local record = prefix .. 'req:' .. id
  -- A finished request keeps its short lifetime, and an expired record is not created again.
  local state = redis.call('HGET', record, 'state')
  if state and state ~= 'finished' then
    local key = prefix .. 'out:' .. id .. ':' .. choice
    local have = redis.call('STRLEN', key)
    local whole_record = have >= tonumber(offset)
    if whole_record and #tokens > 0 then
      have = redis.call('SETRANGE', key, offset, tokens)
      redis.call('PEXPIRE', key, live)
    end
    if finish ~= '0' then whole_record = whole_record and have >= 4 * length end
    if not whole_record then
      short[#short + 1] = id
      short[#short + 1] = choice
    elseif finish ~= '0' then
      redis.call('HSET', record, 'finish:' .. choice, finish)
      trim(key, length)
      redis.call('PEXPIRE', key, live)
    end
    redis.call('PEXPIRE', record, live)
  end
end

for _ = 1, tonumber(arg()) do
  local key = prefix .. 'req:' .. arg()
  local record = redis.call('HMGET', key, 'started_ms', 'tokens', 'class', 'tenant')
  if record[2] and not record[1] then
    redis.call('HSET', key, 'state', 'running', 'started_ms', now)
    leave_queue(KEYS[2], record[2], record[3], record[4])
  end
end

-- Returns finish reason and length of a choice. The stop string of a gateway may have come too late for the core.
local function ending(record, choice, finish, length)
  local at = whole(redis.call('HGET', record, 'stop:' .. choice))
  if at and at >= 0 and at <= length and string.find('124', finish, 1, true) then return '1', at end
  return finish, length
end

local kept_behind = {}  -- requests that ended here; those of older gateways only where they have figures

-- Ends a request. A record that lacks tokens is reported instead, or ends as an error.
local function finish_request(id, stream, entry, given, prompt, lengths, failure)
  local key = prefix .. 'req:' .. id
  local record = redis.call('HMGET', key, 'state', 'started_ms', 'tokens', 'class', 'bucket', 'cost', 'tenant')
  local unfinished = record[1] and record[1] ~= 'finished'
  local output, reasons, counts, lacking = 0, {}, {}, {}
  local reason = string.gmatch(given, '%d+')
  for length in string.gmatch(lengths, '%d+') do
    local choice = #counts
    reasons[choice + 1], counts[choice + 1] = ending(key, choice, reason(), tonumber(length))
    local have = redis.call('STRLEN', prefix .. 'out:' .. id .. ':' .. choice)
    if unfinished and have < 4 * counts[choice + 1] then
      lacking[#lacking + 1] = choice
      if give_up then reasons[choice + 1], counts[choice + 1] = '5', math.floor(have / 4) end
    end
    output = output + counts[choice + 1]
  end
  if #lacking > 0 then
    if not give_up then
      for _, choice in ipairs(lacking) do
        short[#short + 1] = id
        short[#short + 1] = tostring(choice)
      end
      return
    end
    failure = 'output record: tokens were lost in Redis; send the request again'
  end
  for index, length in ipairs(counts) do
    local out = prefix .. 'out:' .. id .. ':' .. index - 1
    if unfinished then trim(out, length) end  -- the first end counts: two shards may run a request behind a loss
    redis.call('PEXPIRE', out, kept)
    redis.call('PEXPIRE', prefix .. 'logprobs:' .. id .. ':' .. index - 1, kept)
    redis.call('PEXPIRE', prefix .. 'prompt_logprobs:' .. id .. ':' .. index - 1, kept)
  end
  local carried = delete_entry(KEYS[2], stream, group, entry)
  redis.call('DEL', prefix .. 'prompt:' .. id)
  if not unfinished then return end
  if carried.kept > 0 then kept_behind[#kept_behind + 1] = {id, #counts, carried.tenant} end
  if not record[2] then leave_queue(KEYS[2], record[3], record[4], record[7]) end
  local bucket = record[5] or ''
  if string.find(bucket, '^orcinus:{[^}]*}:bucket:') and redis.call('EXISTS', bucket) == 1 then
    count(bucket, 'running', -1)
    local left = redis.call('HGET', bucket, 'tokens')
    if left then
      redis.call('HSET', bucket, 'tokens', real(left, 0) + math.max(0, real(record[6], 0) - prompt - output))
    end
  end
  redis.call('HSET', key, 'state', 'finished', 'finish', table.concat(reasons, ','), 'prompt_tokens', prompt,
    'output_tokens', output, 'lengths', table.concat(counts, ','), 'error', failure, 'ended_ms', now)
  redis.call('PEXPIRE', key, kept)
end

for _ = 1, tonumber(arg()) do
  local id, stream, entry, given = arg(), arg(), arg(), arg()
  finish_request(id, stream, entry, given, tonumber(arg()), arg(), arg())
end

local function write_records(name)
  local id, number, offset, records = arg(), arg(), arg(), arg()
  local state = redis.call('HGET', prefix .. 'req:' .. id, 'state')
  if state then
    local key = prefix .. name .. id .. ':' .. number
    -- A hole would be read as figures; a reader that lacks records ends with an error.
    if redis.call('STRLEN', key) >= tonumber(offset) then
      redis.call('SETRANGE', key, offset, records)
      redis.call('PEXPIRE', key, state == 'finished' and kept or live)
    end
  end
end

-- Log-probabilities of the tokens above. More records than tokens in `out` do no harm: readers count by the tokens.
for _ = 1, tonumber(arg()) do
  write_records('logprobs:')
end
for _ = 1, tonumber(arg() or 0) do
  write_records('prompt_logprobs:')
end
for _ = 1, tonumber(arg() or 0) do
  local key, numerics = prefix .. 'req:' .. arg(), arg()
  if redis.call('HGET', key, 'state') then redis.call('HSET', key, 'numerics', numerics) end
end

-- What was counted before the end was foreseen: now there is less, or more. The tokens of `out` are not counted: workers
-- bound them by their speed.
local tenants, kept_bytes = {}, {}
for _, row in ipairs(kept_behind) do
  local id, choices, tenant = row[1], row[2], row[3]
  local have = RECORD_BYTES + #(redis.call('HGET', prefix .. 'req:' .. id, 'delivery') or '') + choices * KEY_BYTES
  for choice = 0, choices - 1 do
    for _, name in ipairs({'logprobs:', 'prompt_logprobs:'}) do
      local size = redis.pcall('STRLEN', prefix .. name .. id .. ':' .. choice)
      if type(size) == 'number' and size > 0 then have = have + size + KEY_BYTES end
    end
  end
  if not kept_bytes[tenant] then tenants[#tenants + 1] = tenant end
  kept_bytes[tenant] = (kept_bytes[tenant] or 0) + have
end
for _, tenant in ipairs(tenants) do
  count_kept(KEYS[2], tenant, kept_bytes[tenant], now)
end
return short
