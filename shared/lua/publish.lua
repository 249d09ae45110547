-- Fenced: writes all results of one iteration in one script.
-- KEYS: lease, queue
-- ARGV: epoch, key prefix, group, ttl ms of live records, ttl ms of finished ones, time span of token streams in ms, then
--       five sections, each a count and its rows:
--       entries (gateway, payload), checkpoints (id, choice, byte offset, tokens, finish or 0, tokens at the end),
--       started (id),
--       ended (id, stream, entry, finish of each choice, prompt tokens, tokens of each choice, error),
--       logprobs (id, choice, byte offset, records)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED another scheduler holds ' .. KEYS[1]) end
local prefix, group, live, kept = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = 6
local function arg()
  at = at + 1
  return ARGV[at]
end

local function leave_queue(tokens, class, tenant)
  redis.call('HINCRBY', KEYS[2], 'tokens', -tokens)
  redis.call('HINCRBY', KEYS[2], 'requests', -1)
  redis.call('HINCRBY', KEYS[2], 'tokens:' .. class, -tokens)
  local tenants = KEYS[2] .. ':tenants'
  if redis.call('HINCRBY', tenants, tenant, -tokens) <= 0 then redis.call('HDEL', tenants, tenant) end
end

-- A stop string ends a sequence before its last tokens: cut the record there.
local function trim(out, length, ttl)
  if redis.call('STRLEN', out) > 4 * length then
    redis.call('SET', out, length == 0 and '' or redis.call('GETRANGE', out, 0, 4 * length - 1))
  end
  redis.call('PEXPIRE', out, ttl)
end

for _ = 1, tonumber(arg()) do
  local key = prefix .. 'tokens:' .. arg()
  redis.call('XADD', key, 'MINID', '~', math.max(0, now - tonumber(ARGV[6])), '*', 'b', arg())
  redis.call('PEXPIRE', key, kept)
end

for _ = 1, tonumber(arg()) do
  local id, choice, offset, tokens, finish, length = arg(), arg(), arg(), arg(), arg(), tonumber(arg())
  local record = prefix .. 'req:' .. id
  -- A finished request keeps its short lifetime, and an expired record is not created again.
  local state = redis.call('HGET', record, 'state')
  if state and state ~= 'finished' then
    local key = prefix .. 'out:' .. id .. ':' .. choice
    if #tokens > 0 then
      redis.call('SETRANGE', key, offset, tokens)
      redis.call('PEXPIRE', key, live)
    end
    if finish ~= '0' then
      redis.call('HSET', record, 'finish:' .. choice, finish)
      trim(prefix .. 'out:' .. id .. ':' .. choice, length, live)
    end
    redis.call('PEXPIRE', record, live)
  end
end

for _ = 1, tonumber(arg()) do
  local key = prefix .. 'req:' .. arg()
  local record = redis.call('HMGET', key, 'started_ms', 'tokens', 'class', 'tenant')
  if record[2] and not record[1] then
    redis.call('HSET', key, 'state', 'running', 'started_ms', now)
    leave_queue(tonumber(record[2]), record[3], record[4])
  end
end

-- Returns finish reason and length of a choice. The stop string of a gateway may have come too late for the core.
local function ending(record, choice, finish, length)
  local at = tonumber(redis.call('HGET', record, 'stop:' .. choice) or nil)
  if at and at <= length and string.find('124', finish, 1, true) then return '1', at end
  return finish, length
end

for _ = 1, tonumber(arg()) do
  local id, stream, entry, given = arg(), arg(), arg(), arg()
  local prompt, lengths, failure = tonumber(arg()), arg(), arg()
  local key = prefix .. 'req:' .. id
  local record = redis.call('HMGET', key, 'state', 'started_ms', 'tokens', 'class', 'bucket', 'cost', 'tenant')
  local output, reasons, counts = 0, {}, {}
  local reason = string.gmatch(given, '%d+')
  for length in string.gmatch(lengths, '%d+') do
    local choice = #counts
    reasons[choice + 1], counts[choice + 1] = ending(key, choice, reason(), tonumber(length))
    output = output + counts[choice + 1]
    trim(prefix .. 'out:' .. id .. ':' .. choice, counts[choice + 1], kept)
    redis.call('PEXPIRE', prefix .. 'logprobs:' .. id .. ':' .. choice, kept)
  end
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
  redis.call('DEL', prefix .. 'prompt:' .. id)
  if record[1] and record[1] ~= 'finished' then
    if not record[2] then leave_queue(tonumber(record[3]), record[4], record[7]) end
    if record[5] and redis.call('EXISTS', record[5]) == 1 then
      redis.call('HINCRBY', record[5], 'running', -1)
      if redis.call('HEXISTS', record[5], 'tokens') == 1 then
        redis.call('HINCRBYFLOAT', record[5], 'tokens', math.max(0, tonumber(record[6]) - prompt - output))
      end
    end
    redis.call('HSET', key, 'state', 'finished', 'finish', table.concat(reasons, ','), 'prompt_tokens', prompt,
      'output_tokens', output, 'lengths', table.concat(counts, ','), 'error', failure, 'ended_ms', now)
    redis.call('PEXPIRE', key, kept)
  end
end

-- Log-probabilities of the tokens above. More records than tokens in `out` do no harm: readers count by the tokens.
for _ = 1, tonumber(arg()) do
  local id, choice, offset, records = arg(), arg(), arg(), arg()
  local state = redis.call('HGET', prefix .. 'req:' .. id, 'state')
  if state then
    local key = prefix .. 'logprobs:' .. id .. ':' .. choice
    redis.call('SETRANGE', key, offset, records)
    redis.call('PEXPIRE', key, state == 'finished' and kept or live)
  end
end
return now
