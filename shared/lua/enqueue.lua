-- Puts one request into its class's stream, once, if the queue and the tenant's buckets have room.
-- KEYS: req, stream, queue, bucket, prompt, gateways with background requests, this gateway's
-- ARGV: request, prompts ('' when inside the request), prompt tokens, most prompt tokens that may wait,
--       cost tokens (prompt + output bound), requests a minute, tokens a minute, concurrent (0: no limit),
--       ttl ms, tenant, gateway, class, delivery (what another gateway needs to go on), id if in the background or '',
--       share of Redis's memory that new requests may fill, most prompt tokens of this tenant that may wait,
--       1: the wait is too long for who waits with more than the others
-- Returns {ok, entry id, requests and tokens that the key has left (-1: no limit)} | {duplicate, state}
--       | {full, waiting tokens} | {tenant, its waiting tokens, tenants that wait} | {late} | {rate, retry ms, what} | {memory, bytes used, bytes at most}
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'duplicate', state} end

-- The rest is for what runs. Gateways look once a second; this looks each time. What came with this call counts already.
local memory = redis.call('INFO', 'memory')
local bound, used = tonumber(string.match(memory, 'maxmemory:(%d+)')), tonumber(string.match(memory, 'used_memory:(%d+)'))
if bound > 0 and used > bound * tonumber(ARGV[15]) then return {'memory', used, bound} end

local tokens = tonumber(ARGV[3])
local waiting = tonumber(redis.call('HGET', KEYS[3], 'tokens') or '0')
if waiting > 0 and waiting + tokens > tonumber(ARGV[4]) then return {'full', waiting} end

local tenants = KEYS[3] .. ':tenants'
if waiting <= 0 then redis.call('DEL', tenants) end
local held, waiters = tonumber(redis.call('HGET', tenants, ARGV[10]) or '0'), redis.call('HLEN', tenants)
if held > 0 and held + tokens > tonumber(ARGV[16]) then return {'tenant', held, waiters} end
-- A long queue is that of whoever has its even share of it or more; the others go on being taken.
if ARGV[17] == '1' and held > 0 and held * waiters >= waiting then return {'late'} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left_requests, left_tokens = -1, -1
local cost, per_request, per_token, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if per_request > 0 or per_token > 0 or most > 0 then
  local held = redis.call('HMGET', KEYS[4], 'requests', 'tokens', 'at', 'running')
  local passed = math.max(0, now - tonumber(held[3] or now))
  local requests = math.min(per_request, tonumber(held[1] or per_request) + passed * per_request / 60000)
  local budget = math.min(per_token, tonumber(held[2] or per_token) + passed * per_token / 60000)
  local running = tonumber(held[4] or '0')
  if most > 0 and running >= most then return {'rate', 1000, 'concurrent requests'} end
  if per_request > 0 and requests < 1 then
    return {'rate', math.ceil((1 - requests) * 60000 / per_request), 'requests a minute'}
  end
  -- A request above the whole bucket may go when the bucket is full, or it could never go.
  if per_token > 0 and budget < math.min(cost, per_token) then
    return {'rate', math.ceil((math.min(cost, per_token) - budget) * 60000 / per_token), 'tokens a minute'}
  end
  redis.call('HSET', KEYS[4], 'at', now, 'running', running + 1)
  -- A limit that is off keeps no level: switched on later, it starts full.
  if per_request > 0 then redis.call('HSET', KEYS[4], 'requests', requests - 1) else redis.call('HDEL', KEYS[4], 'requests') end
  if per_token > 0 then redis.call('HSET', KEYS[4], 'tokens', budget - cost) else redis.call('HDEL', KEYS[4], 'tokens') end
  redis.call('PEXPIRE', KEYS[4], ARGV[9])
  redis.call('HSET', KEYS[1], 'bucket', KEYS[4], 'cost', cost)
  if per_request > 0 then left_requests = math.floor(requests - 1) end
  if per_token > 0 then left_tokens = math.max(0, math.floor(budget - cost)) end
end

if ARGV[2] ~= '' then redis.call('SET', KEYS[5], ARGV[2], 'PX', ARGV[9]) end
local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[1])
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
redis.call('HINCRBY', KEYS[3], 'tokens', tokens)
redis.call('HINCRBY', KEYS[3], 'requests', 1)
redis.call('HINCRBY', KEYS[3], 'tokens:' .. ARGV[12], tokens)
redis.call('HINCRBY', tenants, ARGV[10], tokens)
return {'ok', entry, left_requests, left_tokens}
