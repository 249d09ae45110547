-- Acquires, renews or releases the lease of a shard.
-- KEYS: lease, epoch, epoch of the shard   ARGV: acquire | renew | release, ms, least epoch (acquire) or the lease's text
-- (renew, release), lifetime of the third key in ms, token of the holder (acquire; '' or none: the text is the epoch alone)
-- acquire returns the new epoch or 0; renew and release return 1 or 0. The text is the epoch and, behind a colon, the token:
-- the token leaves one holder where Redis lost its last writes, its clock was set back, and an epoch came twice.
local last = redis.pcall('GET', KEYS[3])
last = type(last) == 'string' and last or ''
if ARGV[1] == 'acquire' then
  -- A lease ends within its time from now. One that would stand longer is foreign, or Redis's clock was set back while its
  -- holder died. The third key says the holder's time, which may be longer than that of a standby; a service of before
  -- wrote none. The key of a foreign lease names another one. Redis before 7.0 knows no LT, and leaves the lease.
  local names_holder = redis.pcall('GET', KEYS[1]) == string.match(last, '^%S+')
  local ms = names_holder and whole(string.match(last, ' (%d+)$'), tonumber(ARGV[4])) or 0
  if ms > tonumber(ARGV[4]) then ms = 0 end
  redis.pcall('PEXPIRE', KEYS[1], string.format('%.0f', math.max(ARGV[2], ms)), 'LT')
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  local epoch = next_epoch(KEYS[2], tonumber(ARGV[3]))
  local text = (ARGV[5] or '') == '' and epoch or epoch .. ':' .. ARGV[5]
  redis.call('SET', KEYS[1], text, 'PX', ARGV[2])
  redis.call('SET', KEYS[3], text .. ' ' .. ARGV[2], 'PX', ARGV[4])
  return tonumber(epoch)
end
local holder = redis.call('GET', KEYS[1])
if ARGV[1] == 'renew' then
  -- An expired lease can be renewed while the shard's last epoch is still this one: no other scheduler had the shard.
  if (holder or string.match(last, '^%S+')) ~= ARGV[3] then return 0 end
  -- Extend existing keys with PEXPIRE: a Redis without free memory accepts it and refuses SET.
  if not holder or redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2]) end
  local said = ARGV[3] .. ' ' .. ARGV[2]
  if last ~= said then redis.pcall('SET', KEYS[3], said, 'PX', ARGV[4]) end
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  return 1
end
if holder ~= ARGV[3] then return 0 end
-- Delete the epoch too, or a late renewal would take the lease back.
redis.call('DEL', KEYS[3])
return redis.call('DEL', KEYS[1])
