-- A gateway's command about one request: sent to the shard that runs it, or written to its record if no shard has it.
-- KEYS: req   ARGV: key prefix, kind (cancel | stop | adopt), Control payload, gateway, tenant ('': not checked), and of
--       stop: choice, tokens to keep; of adopt: the only gateway that it may be taken from ('': any)
-- gateway: for adopt the new gateway; else the gateway that must deliver the request ('': not checked)
-- Returns sent | flagged | finished | unknown | forbidden | elsewhere

-- The sequence ended before its stop string was found: cut the record at the stop string.
local function shorten(choice, length)
  local ended = redis.call('HMGET', KEYS[1], 'finish', 'lengths')
  local finish, lengths, output = {}, {}, 0
  for reason in string.gmatch(ended[1] or '', '%d+') do finish[#finish + 1] = reason end
  for held in string.gmatch(ended[2] or '', '%d+') do lengths[#lengths + 1] = tonumber(held) end
  if not finish[choice + 1] or not lengths[choice + 1] then return end
  if not string.find('124', finish[choice + 1], 1, true) or length > lengths[choice + 1] then return end
  finish[choice + 1], lengths[choice + 1] = '1', length
  for _, held in ipairs(lengths) do output = output + held end
  redis.call('HSET', KEYS[1], 'finish', table.concat(finish, ','), 'lengths', table.concat(lengths, ','),
    'output_tokens', output)
  local out = ARGV[1] .. 'out:' .. string.sub(KEYS[1], #ARGV[1] + #'req:' + 1) .. ':' .. choice
  if redis.call('STRLEN', out) > 4 * length then
    redis.call('SET', out, length == 0 and '' or redis.call('GETRANGE', out, 0, 4 * length - 1), 'KEEPTTL')
  end
end

-- Move a background request to the set of the gateway that delivers it; other gateways watch these sets.
local function move(from, to)
  local id, all = string.sub(KEYS[1], #ARGV[1] + #'req:' + 1), ARGV[1] .. 'background'
  redis.call('SREM', all .. ':' .. from, id)
  redis.call('SADD', all, to)
  redis.call('SADD', all .. ':' .. to, id)
  redis.call('PEXPIRE', all, 86400000)
  redis.call('PEXPIRE', all .. ':' .. to, 86400000)
end

local record = redis.call('HMGET', KEYS[1], 'state', 'shard', 'tenant', 'gateway', 'former', 'background')
if not record[1] then return 'unknown' end
if ARGV[5] ~= '' and ARGV[5] ~= record[3] then return 'forbidden' end
if record[1] == 'finished' then
  if ARGV[2] == 'stop' then shorten(tonumber(ARGV[6]), tonumber(ARGV[7])) end
  return 'finished'
end
if ARGV[2] ~= 'adopt' and ARGV[4] ~= '' and ARGV[4] ~= record[4] then return 'elsewhere' end
-- A repeated adopt finds the request already moved.
local from = ARGV[2] == 'adopt' and ARGV[6] or ''
if from ~= '' and from ~= record[4] and ARGV[4] ~= record[4] then return 'elsewhere' end
if ARGV[2] == 'cancel' then redis.call('HSET', KEYS[1], 'cancelled', 1) end
-- The scheduler may have ended the sequence without having written it yet: publish.lua reads this field.
if ARGV[2] == 'stop' then redis.call('HSET', KEYS[1], 'stop:' .. ARGV[6], ARGV[7]) end
if ARGV[2] == 'adopt' then
  -- The last tokens may be only in the stream of an earlier gateway: a scheduler that takes over the shard reads all.
  local former = record[5] or ' '
  if not string.find(former, ' ' .. record[4] .. ' ', 1, true) then former = former .. record[4] .. ' ' end
  redis.call('HSET', KEYS[1], 'gateway', ARGV[4], 'former', former)
  if record[6] then move(record[4], ARGV[4]) end
end
if not record[2] then return 'flagged' end
local key = ARGV[1] .. 'control:' .. record[2]
append(key, 'MAXLEN', '~', 10000, '*', 'c', ARGV[3])
redis.call('PEXPIRE', key, 86400000)
return 'sent'
