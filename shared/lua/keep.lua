-- Keep a stored response, or forget one, and keep the bytes of all within their bounds: the oldest go first.
-- KEYS: response, index (responses)   ARGV: beginning of the keys of responses, tenant, id, value ('': forget it),
--       retention (ms), bound of all (bytes), bound of the tenant
-- Returns 1 if the response is kept (or forgotten) now; 0 for one that is too large or was forgotten before.
-- A forgotten response leaves an empty value for a while: its request may still have a record.
local beginning, tenant, id, value, retention_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local sizes, bytes, of = KEYS[2] .. ':sizes', KEYS[2] .. ':bytes', KEYS[2] .. ':of:'
local total = ''  -- the field of `bytes` for all; the one of a tenant is 't' and its name

local function drop(name)
  local size, owner = string.match(redis.call('HGET', sizes, name) or '', '^(%d+) (.*)$')
  redis.call('ZREM', KEYS[2], name)
  redis.call('HDEL', sizes, name)
  if not size then return end
  redis.call('ZREM', of .. owner, name)
  count(bytes, total, -size)
  if count(bytes, 't' .. owner, -size) <= 0 then redis.call('HDEL', bytes, 't' .. owner) end
end

-- Drop the oldest while a field of `bytes` is beyond a bound.
local function trim(key, field, bound)
  while whole(redis.call('HGET', bytes, field), 0) > bound do
    local name = redis.call('ZRANGE', key, 0, 0)[1]
    if not name then  -- counted by no one: what is left is not of these responses
      redis.call('HDEL', bytes, field)
      return
    end
    redis.call('DEL', beginning .. name)
    drop(name)
    redis.call('ZREM', key, name)
  end
end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for _, name in ipairs(redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do drop(name) end

if redis.call('GET', KEYS[1]) == '' and value ~= '' then return 0 end
local size, all, own = #value + 256, tonumber(ARGV[6]), tonumber(ARGV[7])
if value ~= '' and (size > all or size > own) then return 0 end
drop(id)
redis.call('SET', KEYS[1], value, 'PX', retention_ms)
if value == '' then return 1 end
redis.call('ZADD', KEYS[2], now + retention_ms, id)
redis.call('ZADD', of .. tenant, now + retention_ms, id)
redis.call('HSET', sizes, id, size .. ' ' .. tenant)
count(bytes, total, size)
count(bytes, 't' .. tenant, size)
trim(of .. tenant, 't' .. tenant, own)
trim(KEYS[2], total, all)
for _, key in ipairs({KEYS[2], sizes, bytes, of .. tenant}) do redis.call('PEXPIRE', key, retention_ms) end
return 1
