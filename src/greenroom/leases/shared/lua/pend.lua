-- A gateway plans a swap: the newcomer's claim is entered before a victim is touched. It gets what is free now and what
-- its victims release later. Admitted only if that is enough, so that each swap can be finished by its own gateway.
local ask = arg.lease
ask.want = ask.want or {}
local lease = lease_of(ask.id)
if lease and not is_slot_of(lease, ask) then
  return denied('taken')
end
local has = lease and lease.claim or {}
if in_grace then
  return denied('grace')
end
if not lease and redis.call('HLEN', LEASES) >= arg.leases_max then
  return denied('full')
end
local promised, victims = {}, {}
for _, id in ipairs(arg.victims) do
  local victim = lease_of(id)
  local other = victim and victim.into and victim.into ~= ask.id and lease_of(victim.into)
  -- 1. A gateway may only name its own leases.  2. Not one that leaves for another swap that is still pending.
  if victim and victim.gateway == ask.gateway and not (other and other.state == 'pending') then
    victims[#victims + 1] = victim
    for device, mib in pairs(victim.claim) do
      promised[device] = (promised[device] or 0) + mib
    end
  end
end
for device, mib in pairs(ask.want) do
  if mib > (has[device] or 0) + math.max(0, free(device)) + (promised[device] or 0) then
    return denied('memory')
  end
end
if not lease then
  lease = ask
  lease.token, lease.claim, lease.lives_to = NO_TOKEN, {}, 0
elseif lease.state ~= 'pending' then
  lease.was, lease.kept = lease.state, lease.state == 'held' and lease.claim or nil
end
local got = {}
for device, mib in pairs(ask.want) do
  local share = math.min(mib, (has[device] or 0) + math.max(0, free(device)))
  got[device] = share > 0 and share or nil
end
-- What it holds already it keeps meanwhile, also where it is to have less: the plan may be called off.
for device, mib in pairs(lease.kept or {}) do
  got[device] = math.max(got[device] or 0, mib)
end
count(lease, got)
lease.state, lease.want, lease.pends_to = 'pending', ask.want, now + arg.pending_ms
save(lease)
for _, victim in ipairs(victims) do
  victim.into = ask.id
  save(victim)
end
changed()
return granted(lease)
