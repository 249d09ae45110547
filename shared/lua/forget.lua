-- Takes requests out of the set of the gateway that delivers them in the background. One that goes on there stays, as
-- where Redis has lost its end.
-- KEYS: set, then the req key of each request   ARGV: gateway, then the id of each request
-- Returns the ids of those that stay.
local stay = {}
for i = 2, #ARGV do
  local record = redis.pcall('HMGET', KEYS[i], 'state', 'gateway')  -- a key of another type is no record
  if record[1] and record[1] ~= 'finished' and record[2] == ARGV[1] then
    stay[#stay + 1] = ARGV[i]
  else
    redis.call('SREM', KEYS[1], ARGV[i])
  end
end
return stay
