-- Takes background requests out of the set of the gateway that delivers them: those that it has read to their ends, that
-- are gone, or that another gateway delivers. The gateway calls it, or one that adopts its requests when it has died.
-- KEYS: set, then the req key of each request   ARGV: gateway, then for each request: id, and its choices (0: it failed,
--       or was adopted; -1: the gateway has not read it to its end)
-- Returns the ids of those that stay: first those that a scheduler has yet to end, as a cancel or the stop strings of
-- all choices without an end say; then those to read.
local waiting, unread = {}, {}

local function ends(key, choices)
  for choice = 0, choices - 1 do
    local fields = redis.call('HMGET', key, 'finish:' .. choice, 'stop:' .. choice)
    if not (fields[1] or fields[2]) then return false end
  end
  return choices > 0
end

for i = 2, #KEYS do
  local id, choices = ARGV[2 * i - 2], tonumber(ARGV[2 * i - 1])
  local record = redis.pcall('HMGET', KEYS[i], 'state', 'gateway', 'cancelled')  -- a key of another type is no record
  local finished = record[1] == 'finished'
  if not record[1] or record[2] ~= ARGV[1] or (finished and choices >= 0) then
    redis.call('SREM', KEYS[1], id)
  elseif not finished and (record[3] or ends(KEYS[i], choices)) then
    waiting[#waiting + 1] = id
  else
    unread[#unread + 1] = id
  end
end
return {waiting, unread}
