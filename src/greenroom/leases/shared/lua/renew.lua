-- Renews leases of one kind. `arg.leases` holds id, token and, where the holder knows it, the whole record: a book that
-- does not have it, because it was lost or is an older copy, learns it from that.
local function was_lost_by_us(token)
  return token <= birth or token > last_known_here
end

-- 1. During the grace nothing new was granted, so all leases that were held before fit together.
-- 2. Later it must fit, on the devices that have been heard of since.
local function is_still_there(claim)
  look()
  local known = {}
  for device, mib in pairs(claim) do
    known[device] = usable[device] and mib
  end
  return in_grace or fits(known, {})
end

-- Who holds a lease comes before a waiter that has taken its id meanwhile; that one is refused when it asks again.
local function register_again(record, token, waiter)
  record.claim = record.claim or {}
  if not was_lost_by_us(token) or not is_still_there(record.claim) then
    return nil
  end
  if waiter then
    forget(waiter)
  end
  if token > last then
    last = token
    redis.call('HSET', META, 'last', digits(last))
  end
  local claim = record.claim
  record.claim, record.state, record.lives_to = {}, 'held', now + record.ttl_ms
  count(record, claim)
  save(record)
  changed()
  return record
end

local renewed, lost = {}, {}
for _, known in ipairs(arg.leases) do
  local there, lease = lease_of(known.id), nil
  if there and there.token ~= NO_TOKEN and there.token == known.token and there.kind == arg.kind then
    lease = there
    lease.lives_to = now + lease.ttl_ms
    save(lease)
  elseif known.record and known.record.kind == arg.kind and (not there or there.state == 'waiting') then
    lease = register_again(known.record, tonumber(known.token), there)
  end
  if lease then
    renewed[known.id] = lease
  else
    lost[known.id] = true
  end
end
return cjson.encode({ renewed = renewed, lost = lost, now = now, last = digits(last) })
