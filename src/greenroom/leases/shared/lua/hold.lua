-- A gateway holds a slot's claim: one that was pending, one of another size than before, or a new one that fits.
-- What a smaller claim sets free goes where a release would let it go.
local ask = arg.lease
ask.want = ask.want or {}
local lease = lease_of(ask.id)
if lease and not is_slot_of(lease, ask) then
  return denied('taken')
end
local has = lease and lease.claim or {}
local grows = false
for device, mib in pairs(ask.want) do
  grows = grows or mib > (has[device] or 0)
end
if in_grace and grows then
  return denied('grace')
end
if not lease and redis.call('HLEN', LEASES) >= arg.leases_max then
  return denied('full')
end
if not fits(ask.want, has) then
  return denied('memory')
end
local freed = {}
for device, mib in pairs(has) do
  freed[device] = math.max(0, mib - (ask.want[device] or 0))
end
local into = arg.into or (lease and lease.into)
if not lease then
  lease, ask.claim, ask.state, ask.token = ask, {}, 'waiting', NO_TOKEN
end
local claim = ask.want
-- Who stood in line for a slot of this gateway holds it for that slot from now on.
lease.into, lease.gateway = nil, ask.gateway
grant(lease, claim)
local target = into and lease_of(into)
if target and target.state ~= 'held' then
  pour(freed, target)
end
promote()
return granted(lease)
