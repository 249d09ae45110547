-- Keep a stored response, or forget one, and keep the bytes of all within their bounds: the oldest go first.
-- KEYS: response, index (responses)   ARGV: beginning of the keys of responses, tenant, id, value ('': forget it),
--       retention (ms), bound of all (bytes), bound of the tenant, 1 to leave a response that is there
-- Returns 1 if the response is kept (or forgotten) now, 2 if it was left; 0 for one that is too large, which removes an
-- earlier state, or was forgotten before. A forgotten response leaves an empty value for a while: its request may still
-- have a record.
local beginning, tenant, id, value, retention_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local bound, tenant_bound = tonumber(ARGV[6]), tonumber(ARGV[7])
local sizes, bytes, tenants = KEYS[2] .. ':sizes', KEYS[2] .. ':bytes', KEYS[2] .. ':of:'
local total = ''  -- the field of `bytes` for all responses; the one of a tenant is 't' and its name
local LONGEST_MS = 31 * 86400000  -- a day above the longest retention: an index outlives what it counts

local function drop(name)
  local size, owner = string.match(redis.call('HGET', sizes, name) or '', '^(%d+) (.*)$')
  redis.call('ZREM', KEYS[2], name)
  redis.call('HDEL', sizes, name)
  if not size then return end
  redis.call('ZREM', tenants .. owner, name)
  count(bytes, total, -size)
  if count(bytes, 't' .. owner, -size) <= 0 then redis.call('HDEL', bytes, 't' .. owner) end
end

-- Drop the oldest of an index while a field of `bytes` is beyond a bound.
local function trim(index, field, most)
  while whole(redis.call('HGET', bytes, field), 0) > most do
    local name = redis.call('ZRANGE', index, 0, 0)[1]
    if not name then  -- what is left in the field belongs to no response
      redis.call('HDEL', bytes, field)
      return
    end
    redis.call('DEL', beginning .. name)
    drop(name)
    redis.call('ZREM', index, name)
  end
end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for _, name in ipairs(redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do drop(name) end

local held = redis.call('GET', KEYS[1])
if value ~= '' and held == '' then return 0 end
if held and ARGV[8] == '1' then return 2 end
drop(id)
local size = #value + 256
if value ~= '' and (size > bound or size > tenant_bound) then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('SET', KEYS[1], value, 'PX', retention_ms)
if value == '' then return 1 end
redis.call('ZADD', KEYS[2], now + retention_ms, id)
redis.call('ZADD', tenants .. tenant, now + retention_ms, id)
redis.call('HSET', sizes, id, size .. ' ' .. tenant)
count(bytes, total, size)
count(bytes, 't' .. tenant, size)
trim(tenants .. tenant, 't' .. tenant, tenant_bound)
trim(KEYS[2], total, bound)
for _, key in ipairs({KEYS[2], sizes, bytes, tenants .. tenant}) do redis.call('PEXPIRE', key, LONGEST_MS) end
return 1
