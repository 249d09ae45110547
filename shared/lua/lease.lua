-- KEYS: lease, epoch, epoch of the shard   ARGV: acquire | renew | release, ms, epoch (renew, release), ms that the
-- third key is kept
-- acquire returns the new epoch or 0; renew and release return 1 or 0.
if ARGV[1] == 'acquire' then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  local epoch = redis.call('INCR', KEYS[2])
  if epoch == 1 then
    -- The counter begins at the clock: a Redis that lost its data gives no epoch that a worker has seen before.
    epoch = tonumber(redis.call('TIME')[1])
    redis.call('SET', KEYS[2], epoch)
  end
  redis.call('SET', KEYS[1], epoch, 'PX', ARGV[2])
  redis.call('SET', KEYS[3], epoch, 'PX', ARGV[4])
  return epoch
end
local holder = redis.call('GET', KEYS[1])
if ARGV[1] == 'renew' then
  -- A lease that ran out is still ours when nobody has had this shard since: its last epoch says so.
  if holder ~= ARGV[3] and (holder or redis.call('GET', KEYS[3]) ~= ARGV[3]) then return 0 end
  -- What is there only lives longer: that a Redis without memory takes as well, and a SET it does not.
  if not holder or redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2]) end
  if redis.call('PEXPIRE', KEYS[3], ARGV[4]) == 0 then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
  return 1
end
if holder ~= ARGV[3] then return 0 end
-- Nor may what was given up be renewed: a write that is late would do that.
redis.call('DEL', KEYS[3])
return redis.call('DEL', KEYS[1])
