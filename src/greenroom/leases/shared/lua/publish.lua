-- A gateway's heartbeat: how much of each device may be planned with, and what freeing memory there would cost it. It
-- is told for which leases it must make room, and whether anything changed; a recall is a change too.
--
-- A key that another program uses for something else is found here, by each heartbeat, and not by some operations only.
for _, key in ipairs({ LEASES, USABLE, TAKEN, GATEWAYS }) do
  redis.call('HLEN', key)
end
redis.call('ZCARD', LINE)
local is_different = false
for device, mib in pairs(arg.devices) do
  if redis.call('HGET', USABLE, device) ~= digits(mib) then
    redis.call('HSET', USABLE, device, digits(mib))
    is_different = true
  end
end
if is_different then
  usable = nil
  changed()
end
redis.call('HSET', GATEWAYS, arg.gateway, cjson.encode({ seen = now, prices = arg.prices }))
local heads = promote()
give_turns(heads, living_gateways())
local make_room = {}
for _, head in ipairs(heads) do
  if head.lease.turn == arg.gateway then
    -- Others wait on the devices that are left out here, and come first there.
    head.lease.devices = head.where.devices
    make_room[head.lease.id] = head.lease
  end
end
local version = redis.call('HGET', META, 'version')
local grace_left_ms = math.max(0, arg.birth_grace_ms - now)
return cjson.encode({
  make_room = make_room,
  version = version,
  grace_left_ms = grace_left_ms,
  now = now,
  last = digits(last),
})
