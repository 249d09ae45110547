-- A gateway's command about one request: to the shard that runs it, or onto its record when none has claimed it.
-- KEYS: req   ARGV: key prefix, kind (cancel | stop | adopt), Control payload, gateway, tenant ('' : not asked)
-- gateway: who adopts; for the others, who must deliver the request for the command to count ('' : not asked)
-- Returns sent | flagged | finished | unknown | forbidden | elsewhere
local record = redis.call('HMGET', KEYS[1], 'state', 'shard', 'tenant', 'gateway', 'former')
if not record[1] then return 'unknown' end
if ARGV[5] ~= '' and ARGV[5] ~= record[3] then return 'forbidden' end
if record[1] == 'finished' then return 'finished' end
if ARGV[2] ~= 'adopt' and ARGV[4] ~= '' and ARGV[4] ~= record[4] then return 'elsewhere' end
if ARGV[2] == 'cancel' then redis.call('HSET', KEYS[1], 'cancelled', 1) end
if ARGV[2] == 'adopt' then
  -- The last tokens may be nowhere but in the stream of a gateway before: whoever takes the shard reads them all.
  local former = record[5] or ' '
  if not string.find(former, ' ' .. record[4] .. ' ', 1, true) then former = former .. record[4] .. ' ' end
  redis.call('HSET', KEYS[1], 'gateway', ARGV[4], 'former', former)
end
if not record[2] then return 'flagged' end
local key = ARGV[1] .. 'control:' .. record[2]
redis.call('XADD', key, 'MAXLEN', '~', 10000, '*', 'c', ARGV[3])
redis.call('PEXPIRE', key, 86400000)
return 'sent'
