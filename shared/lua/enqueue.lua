-- Adds requests to the streams of their classes, each once, if the queue and the buckets of its key have room. A request
-- that is refused, or that Redis refuses, leaves the others of the call alone.
-- KEYS: queue, gateways with background requests, background requests of this gateway, then for each request: req, stream,
--       bucket, prompt
-- ARGV: ttl ms, gateway, share of Redis's memory that new requests may fill, then for each request: request, prompts ('' if
--       inside the request), prompt tokens, bound of waiting prompt tokens, cost tokens (prompt + output bound), requests a
--       minute, tokens a minute, concurrent requests (0: no limit), tenant, class, delivery (state that another gateway
--       needs to continue), id if in the background or '', bound of this tenant's waiting prompt tokens, 1 if the wait is
--       too long for tenants that hold their even share of the queue or more, bound of the bytes of requests that have not
--       ended or are kept behind it, bound of this tenant's (0: no bound), bytes of it that stay
--       for KEPT_MS behind its end beside its record, bytes that its gateway holds until its end, name of the grammar and
--       its text ('', '' if inside the request)
-- Returns for each request: {ok, entry id, requests and tokens that the key has left (-1: no limit)} | {duplicate, state}
--       | {full, waiting tokens} | {tenant, its waiting tokens, waiting tenants} | {late} | {rate, retry ms, limit}
--       | {memory, bytes used, bound in bytes} | {bytes, held bytes, bytes of this request, ms, waiting tokens}
--       | {tenant bytes, its held bytes, bytes of this request, ms, its waiting tokens, waiting tenants} | {error, text}
-- ms: until enough of what is kept has gone, and where more is needed until the last of it; 0: the ends of requests free
-- enough
local queue, ttl, gateway, share = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local PER_KEYS, PER_ARGV = 4, 20
local KEPT_MS = 300000  -- the lifetime of what is read behind the end of a request
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local memory_used, memory_most, kept_rows

-- The remaining memory is for running requests. Gateways check once a second, this script at every call. The memory of
-- this call counts.
local function memory_full()
  if not memory_used then
    local memory = redis.call('INFO', 'memory')
    memory_most = tonumber(string.match(memory, 'maxmemory:(%d+)'))
    memory_used = tonumber(string.match(memory, 'used_memory:(%d+)'))
  end
  return memory_most > 0 and memory_used > memory_most * share
end

-- tenant: nil for the bytes of all
local function expires_ms(held, wanted, tenant)
  kept_rows = kept_rows or redis.call('XRANGE', queue .. ':kept', '-', '+', 'COUNT', KEPT_ROWS)
  local kept, at = 0, nil
  for _, row in ipairs(kept_rows) do
    if not tenant or row[2][2] == tenant then
      if kept < wanted then at = tonumber(string.match(row[1], '^%d+')) end
      kept = kept + math.max(0, whole(row[2][4], 0))
    end
  end
  if not at or (held - kept >= wanted and #kept_rows < KEPT_ROWS) then return 0 end
  return math.max(1, at + KEPT_MS - now)
end

local function enqueue(req, stream, bucket, prompt, request, prompts, tokens, most_tokens, cost, per_request, per_token,
  most, tenant, class, delivery, background, tenant_tokens, is_late, most_bytes, tenant_most_bytes, kept_bytes, gateway_bytes,
  grammar, text)
  local state = redis.call('HGET', req, 'state')
  if state then return {'duplicate', state} end

  if memory_full() then return {'memory', memory_used, memory_most} end

  local waiting = whole(redis.call('HGET', queue, 'tokens'), 0)
  if waiting > 0 and waiting + tokens > most_tokens then return {'full', waiting} end

  local tenants = queue .. ':tenants'
  local held, waiters = whole(redis.call('HGET', tenants, tenant), 0), redis.call('HLEN', tenants)
  if held > 0 and held + tokens > tenant_tokens then return {'tenant', held, waiters} end

  -- Bytes as they lie in Redis until the request ends: message, prompts, and the record with its keys and fields. The
  -- conversation that its gateway holds comes to Redis at its end.
  local bytes = #request + #prompts + #delivery + 2048 + kept_bytes + gateway_bytes
  -- The text of a grammar counts with the first request that has it.
  local added = bytes + (grammar ~= '' and not grammar_bytes(queue, grammar) and #text or 0)
  local function exceeds(total, most) return most > 0 and total > 0 and total + added > most end
  local all_bytes = whole(redis.call('HGET', queue, 'bytes'), 0)
  local tenant_bytes = whole(redis.call('HGET', queue .. ':bytes', tenant), 0)
  if exceeds(all_bytes, most_bytes) then
    local wanted = math.min(all_bytes, all_bytes + added - most_bytes)
    return {'bytes', all_bytes, added, expires_ms(all_bytes, wanted), waiting}
  end
  if exceeds(tenant_bytes, tenant_most_bytes) then
    local wanted = math.min(tenant_bytes, tenant_bytes + added - tenant_most_bytes)
    return {'tenant bytes', tenant_bytes, added, expires_ms(tenant_bytes, wanted, tenant), held, waiters}
  end

  -- In a long queue only tenants that hold their even share or more are refused.
  if is_late and held > 0 and held * waiters >= waiting then return {'late'} end

  local left_requests, left_tokens = -1, -1
  local is_limited = per_request > 0 or per_token > 0 or most > 0
  local requests, budget, running
  if is_limited then
    local held = redis.call('HMGET', bucket, 'requests', 'tokens', 'at', 'running')
    local passed = math.max(0, now - real(held[3], now))
    requests = math.min(per_request, real(held[1], per_request) + passed * per_request / 60000)
    budget = math.min(per_token, real(held[2], per_token) + passed * per_token / 60000)
    running = whole(held[4], 0)
    if most > 0 and running >= most then return {'rate', 1000, string.format('%d concurrent requests', most)} end
    if per_request > 0 and requests < 1 then
      return {'rate', math.ceil((1 - requests) * 60000 / per_request), string.format('%d requests a minute', per_request)}
    end
    -- A request larger than the bucket is admitted when the bucket is full; else it never could be.
    if per_token > 0 and budget < math.min(cost, per_token) then
      return {'rate', math.ceil((math.min(cost, per_token) - budget) * 60000 / per_token), string.format('%d tokens a minute', per_token)}
    end
  end

  -- First of all writes: Redis may refuse it, and then the request leaves nothing.
  local kept = RECORD_BYTES + #delivery + kept_bytes
  local fields = {r = request, id = string.sub(req, #prefix_of(queue) + #'req:' + 1), tenant = tenant, tokens = tokens, bytes = bytes,
    kept = kept, grammar = grammar}
  local entry = add_entry(queue, stream, fields, text)
  if is_limited then
    redis.call('HSET', bucket, 'at', now, 'running', running + 1)
    -- A limit that is off has no level. If it is switched on later, its bucket starts full.
    if per_request > 0 then redis.call('HSET', bucket, 'requests', requests - 1) else redis.call('HDEL', bucket, 'requests') end
    if per_token > 0 then redis.call('HSET', bucket, 'tokens', budget - cost) else redis.call('HDEL', bucket, 'tokens') end
    redis.call('PEXPIRE', bucket, ttl)
    redis.call('HSET', req, 'bucket', bucket, 'cost', cost)
    if per_request > 0 then left_requests = math.floor(requests - 1) end
    if per_token > 0 then left_tokens = math.max(0, math.floor(budget - cost)) end
  end

  if prompts ~= '' then redis.call('SET', prompt, prompts, 'PX', ttl) end
  redis.call('HSET', req, 'state', 'queued', 'tenant', tenant, 'gateway', gateway, 'class', class,
    'tokens', tokens, 'enqueued_ms', now, 'attempts', 0, 'stream', stream, 'entry', entry, 'delivery', delivery)
  if background ~= '' then
    redis.call('HSET', req, 'background', 1)
    redis.call('SADD', KEYS[2], gateway)
    redis.call('SADD', KEYS[3], background)
    redis.call('PEXPIRE', KEYS[2], ttl)
    redis.call('PEXPIRE', KEYS[3], ttl)
  end
  redis.call('PEXPIRE', req, ttl)
  count(queue, 'tokens', tokens)
  count(queue, 'requests', 1)
  count(queue, 'tokens:' .. class, tokens)
  count(tenants, tenant, tokens)
  return {'ok', entry, left_requests, left_tokens}
end

count_expired(queue, now - KEPT_MS, now + KEPT_MS)
-- A queue without entries needs no scheduler for this; a key of another type keeps it from this alone.
pcall(recount, queue, 0, KEPT_ROWS)
local answers = {}
for i = 0, (#KEYS - 3) / PER_KEYS - 1 do
  local k, a = 3 + i * PER_KEYS, 3 + i * PER_ARGV
  local done, answer = pcall(enqueue, KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4], ARGV[a + 1], ARGV[a + 2],
    tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]), tonumber(ARGV[a + 7]),
    tonumber(ARGV[a + 8]), ARGV[a + 9], ARGV[a + 10], ARGV[a + 11], ARGV[a + 12], tonumber(ARGV[a + 13]),
    ARGV[a + 14] == '1', tonumber(ARGV[a + 15]), tonumber(ARGV[a + 16]), tonumber(ARGV[a + 17]),
    tonumber(ARGV[a + 18]), ARGV[a + 19], ARGV[a + 20])
  if not done then answer = {'error', type(answer) == 'table' and answer.err or tostring(answer)} end
  answers[i + 1] = answer
end
return answers
