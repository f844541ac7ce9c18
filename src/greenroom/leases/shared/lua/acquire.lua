-- A program asks for memory, or asks again while it waits: `arg.lease` is what it asks, `arg.is_last` that it waits no
-- longer. The same ask again is the same lease; `arg.asker` is the call that asks, of which there may be several. Any
-- other ask with the id of a lease that is held, pending or waited for is refused and changes nothing.
-- A program that found devices itself says so in `arg.offers`; what a gateway has published it leaves alone.
for device, mib in pairs(arg.offers) do
  if redis.call('HSETNX', USABLE, device, digits(mib)) == 1 then
    usable = nil
  end
end
local ask = arg.lease
local lease = lease_of(ask.id)
if lease and not is_of(lease, ask) then
  return denied('taken')
end
if lease and lease.state == 'held' then
  told(lease, arg.asker)
  lease.lives_to = now + lease.ttl_ms
  save(lease)
  return granted(lease)
end
if not lease then
  ask.state, ask.token, ask.claim, ask.lives_to = 'waiting', NO_TOKEN, {}, now + WAITER_MS
  local waiting = redis.call('ZCARD', LINE)
  if redis.call('HLEN', LEASES) >= arg.leases_max or waiting >= LINE_MAX then
    return denied('full')
  end
  -- Most asks find no line and need not stand in it.
  local claim = waiting == 0 and not in_grace and place(ask, free, {})
  if claim then
    told(ask, arg.asker)
    grant(ask, claim)
    return granted(ask)
  end
  lease = ask
  join(lease)
else
  lease.lives_to = now + WAITER_MS
end
save(lease)
local heads = promote()
local is_full = lease.is_full
if lease.state == 'pending' then
  is_full = fits(lease.want, lease.claim)
end
if is_full and not in_grace then
  told(lease, arg.asker)
  grant(lease, lease.want or lease.claim)
  return granted(lease)
end
if arg.is_last then
  forget(lease)
  promote()
  return denied(in_grace and 'grace' or redis.call('ZCARD', LINE) > 0 and 'line' or 'memory')
end
give_turns(heads, #heads > 0 and living_gateways() or {})
return cjson.encode({ waiting = true, arrival = lease.arrival, now = now, last = digits(last) })
