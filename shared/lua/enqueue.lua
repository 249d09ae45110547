-- Adds one request to the stream of its class, once, if the queue and the buckets of its key have room.
-- KEYS: req, stream, queue, bucket, prompt, gateways with background requests, background requests of this gateway
-- ARGV: request, prompts ('' if inside the request), prompt tokens, bound of waiting prompt tokens,
--       cost tokens (prompt + output bound), requests a minute, tokens a minute, concurrent requests (0: no limit),
--       ttl ms, tenant, gateway, class, delivery (state that another gateway needs to continue), id if in the
--       background or '', share of Redis's memory that new requests may fill, bound of this tenant's waiting prompt
--       tokens, 1 if the wait is too long for tenants that hold their even share of the queue or more, bound of the bytes
--       of requests that have not ended, bound of this tenant's (0: no bound)
-- Returns {ok, entry id, requests and tokens that the key has left (-1: no limit)} | {duplicate, state}
--       | {full, waiting tokens} | {tenant, its waiting tokens, waiting tenants} | {late} | {rate, retry ms, limit}
--       | {memory, bytes used, bound in bytes} | {bytes, held bytes, bytes of this request, waiting tokens}
--       | {tenant bytes, its held bytes, bytes of this request, its waiting tokens, waiting tenants}
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'duplicate', state} end

-- The remaining memory is for running requests. Gateways check once a second, this script at every call. The memory of
-- this call counts.
local memory = redis.call('INFO', 'memory')
local bound, used = tonumber(string.match(memory, 'maxmemory:(%d+)')), tonumber(string.match(memory, 'used_memory:(%d+)'))
if bound > 0 and used > bound * tonumber(ARGV[15]) then return {'memory', used, bound} end

local tokens = tonumber(ARGV[3])
local waiting = whole(redis.call('HGET', KEYS[3], 'tokens'), 0)
if waiting > 0 and waiting + tokens > tonumber(ARGV[4]) then return {'full', waiting} end

local tenants = KEYS[3] .. ':tenants'
if waiting <= 0 then redis.call('DEL', tenants) end
local held, waiters = whole(redis.call('HGET', tenants, ARGV[10]), 0), redis.call('HLEN', tenants)
if held > 0 and held + tokens > tonumber(ARGV[16]) then return {'tenant', held, waiters} end

-- Bytes as they lie in Redis until the request ends: message, prompts, and the record with its keys and fields.
local bytes = #ARGV[1] + #ARGV[2] + #ARGV[13] + 2048
local function exceeds(total, most) return most > 0 and total > 0 and total + bytes > most end
local function held_bytes()
  return whole(redis.call('HGET', KEYS[3], 'bytes'), 0), whole(redis.call('HGET', KEYS[3] .. ':bytes', ARGV[10]), 0)
end
local most_bytes, tenant_most_bytes = tonumber(ARGV[18]), tonumber(ARGV[19])
local all_bytes, tenant_bytes = held_bytes()
if exceeds(all_bytes, most_bytes) or exceeds(tenant_bytes, tenant_most_bytes) then
  -- A stream that was deleted leaves the counts of its entries. Without an entry in any stream nothing is held.
  local entries = 0
  for _, class in ipairs({'realtime', 'high', 'normal', 'low'}) do
    entries = entries + redis.call('XLEN', string.sub(KEYS[3], 1, -#'queue' - 1) .. 'requests:' .. class)
  end
  if entries == 0 then
    redis.call('HDEL', KEYS[3], 'bytes')
    redis.call('DEL', KEYS[3] .. ':bytes')
    all_bytes, tenant_bytes = held_bytes()
  end
end
if exceeds(all_bytes, most_bytes) then return {'bytes', all_bytes, bytes, waiting} end
if exceeds(tenant_bytes, tenant_most_bytes) then return {'tenant bytes', tenant_bytes, bytes, held, waiters} end

-- In a long queue only tenants that hold their even share or more are refused.
if ARGV[17] == '1' and held > 0 and held * waiters >= waiting then return {'late'} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left_requests, left_tokens = -1, -1
local cost, per_request, per_token, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if per_request > 0 or per_token > 0 or most > 0 then
  local held = redis.call('HMGET', KEYS[4], 'requests', 'tokens', 'at', 'running')
  local passed = math.max(0, now - real(held[3], now))
  local requests = math.min(per_request, real(held[1], per_request) + passed * per_request / 60000)
  local budget = math.min(per_token, real(held[2], per_token) + passed * per_token / 60000)
  local running = whole(held[4], 0)
  if most > 0 and running >= most then return {'rate', 1000, 'concurrent requests'} end
  if per_request > 0 and requests < 1 then
    return {'rate', math.ceil((1 - requests) * 60000 / per_request), 'requests a minute'}
  end
  -- A request larger than the bucket is admitted when the bucket is full; else it never could be.
  if per_token > 0 and budget < math.min(cost, per_token) then
    return {'rate', math.ceil((math.min(cost, per_token) - budget) * 60000 / per_token), 'tokens a minute'}
  end
  redis.call('HSET', KEYS[4], 'at', now, 'running', running + 1)
  -- A limit that is off has no level. If it is switched on later, its bucket starts full.
  if per_request > 0 then redis.call('HSET', KEYS[4], 'requests', requests - 1) else redis.call('HDEL', KEYS[4], 'requests') end
  if per_token > 0 then redis.call('HSET', KEYS[4], 'tokens', budget - cost) else redis.call('HDEL', KEYS[4], 'tokens') end
  redis.call('PEXPIRE', KEYS[4], ARGV[9])
  redis.call('HSET', KEYS[1], 'bucket', KEYS[4], 'cost', cost)
  if per_request > 0 then left_requests = math.floor(requests - 1) end
  if per_token > 0 then left_tokens = math.max(0, math.floor(budget - cost)) end
end

if ARGV[2] ~= '' then redis.call('SET', KEYS[5], ARGV[2], 'PX', ARGV[9]) end
local entry = add_entry(KEYS[3], KEYS[2], ARGV[1], ARGV[10], bytes)
redis.call('HSET', KEYS[1], 'state', 'queued', 'tenant', ARGV[10], 'gateway', ARGV[11], 'class', ARGV[12],
  'tokens', tokens, 'enqueued_ms', now, 'attempts', 0, 'stream', KEYS[2], 'entry', entry, 'delivery', ARGV[13])
if ARGV[14] ~= '' then
  redis.call('HSET', KEYS[1], 'background', 1)
  redis.call('SADD', KEYS[6], ARGV[11])
  redis.call('SADD', KEYS[7], ARGV[14])
  redis.call('PEXPIRE', KEYS[6], ARGV[9])
  redis.call('PEXPIRE', KEYS[7], ARGV[9])
end
redis.call('PEXPIRE', KEYS[1], ARGV[9])
count(KEYS[3], 'tokens', tokens)
count(KEYS[3], 'requests', 1)
count(KEYS[3], 'tokens:' .. ARGV[12], tokens)
count(tenants, ARGV[10], tokens)
return {'ok', entry, left_requests, left_tokens}
