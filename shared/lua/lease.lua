-- KEYS: lease, epoch   ARGV: acquire | renew | release, ms, epoch (renew, release)
-- acquire returns the new epoch or 0; renew and release return 1 or 0.
if ARGV[1] == 'acquire' then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  local epoch = redis.call('INCR', KEYS[2])
  redis.call('SET', KEYS[1], epoch, 'PX', ARGV[2])
  return epoch
end
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return 0 end
if ARGV[1] == 'renew' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('DEL', KEYS[1])
end
return 1
