-- The queue of waiting leases, by priority and then by arrival; and which gateway must make room for them.
--
-- Memory that is released for a waiting lease is kept for it, but a lease further ahead may take it.
local LINE_MAX = 256
-- One priority is further from the next than arrivals will ever be from each other.
local PRIORITY_STEP = 2 ^ 40
-- A waiter asks again at least twice a second; one that is not heard of for this long has gone.
local WAITER_MS = 3000
-- What was released for a waiter, but is not all it needs, is kept for it this long.
local PARTIAL_MS = 15000
-- A gateway is heard of every second.
local GATEWAY_MS = 3000
local TURN_MS = 5000

local function allows(ask, device)
  if device == HOST then
    return false
  end
  return ask.devices == '' or string.find(',' .. ask.devices .. ',', ',' .. device .. ',', 1, true) ~= nil
end

-- What it wants of a device: as much of each, or a share of its own of every one.
local function share_of(ask, device)
  return ask.shares and (ask.shares[device] or 0) or ask.mib
end

-- The claim that fits these devices best, or nil.
local function place(ask, room, barred)
  look()
  local fitting = {}
  for _, device in ipairs(names) do
    if allows(ask, device) and not barred[device] and room(device) >= share_of(ask, device) then
      fitting[#fitting + 1] = device
    end
  end
  if #fitting < ask.gpus then
    return nil
  end
  table.sort(fitting, function(one, other)
    local here, there = room(one), room(other)
    return here < there or (here == there and one < other)
  end)
  local claim = {}
  for number = 1, ask.gpus do
    claim[fitting[number]] = share_of(ask, fitting[number])
  end
  return claim
end

local function same(one, other)
  if type(one) ~= 'table' or type(other) ~= 'table' then
    return one == other
  end
  for key, value in pairs(one) do
    if other[key] ~= value then
      return false
    end
  end
  for key in pairs(other) do
    if one[key] == nil then
      return false
    end
  end
  return true
end

-- Whether this ask is the one that the lease came of, made again: by the same holder, for as much, where it is.
local function is_of(lease, ask)
  if lease.kind ~= ask.kind or lease.mib ~= ask.mib or lease.gpus ~= ask.gpus then
    return false
  end
  if not same(lease.shares, ask.shares) or not same(lease.holder, ask.holder) then
    return false
  end
  if lease.state ~= 'held' then
    return lease.devices == ask.devices
  end
  for device in pairs(lease.claim) do
    if not allows(ask, device) then
      return false
    end
  end
  return true
end

-- Whether the lease is that of a slot of the gateway that asks. One that stood in line has no gateway yet.
local function is_slot_of(lease, ask)
  if lease.kind ~= 'slot' then
    return false
  end
  return lease.gateway == ask.gateway or (not lease.gateway and same(lease.holder, ask.holder))
end

-- The calls that were told that the lease is held, separated by commas. It is given up only after each of them was
-- reported as unheard. If they are too many to list, it is never given up this way.
local TOLD_MAX = 512
local SEVERAL = ''

local function was_told(lease, asker)
  local calls = lease.told_to or SEVERAL
  return calls ~= SEVERAL and string.find(',' .. calls .. ',', ',' .. asker .. ',', 1, true) ~= nil
end

local function told(lease, asker)
  if not lease.told_to then
    lease.told_to = asker
  elseif lease.told_to ~= SEVERAL and not was_told(lease, asker) then
    local all = lease.told_to .. ',' .. asker
    lease.told_to = #all <= TOLD_MAX and all or SEVERAL
  end
end

-- This call was told and not heard. Returns whether that was the last.
local function untold(lease, asker)
  if not was_told(lease, asker) then
    return false
  end
  local others = {}
  for other in string.gmatch(lease.told_to, '[^,]+') do
    others[#others + 1] = other ~= asker and other or nil
  end
  if #others > 0 then
    lease.told_to = table.concat(others, ',')
    save(lease)
  end
  return #others == 0
end

-- Whether it would fit if no lease was held. If not, it blocks no other lease in the queue.
local function is_possible(ask)
  return place(ask, function(device)
    return usable[device]
  end, {}) ~= nil
end

local function line()
  local entries = {}
  for _, id in ipairs(redis.call('ZRANGE', LINE, 0, -1)) do
    entries[#entries + 1] = lease_of(id)
  end
  return entries
end

-- A waiter that the book took for gone, or that waited before the book was lost, says which place it had.
local function join(lease)
  local arrivals = tonumber(redis.call('HGET', META, 'arrivals') or 0)
  lease.arrival = lease.arrival or arrivals + 1
  redis.call('HSET', META, 'arrivals', digits(math.max(arrivals, lease.arrival)))
  redis.call('ZADD', LINE, digits(lease.priority * PRIORITY_STEP + lease.arrival), lease.id)
  changed()
end

-- What this one may have: what is free, what it has got, and what those behind it have got.
local function room_for(entries, number)
  return function(device)
    local room = free(device)
    for behind = number, #entries do
      local entry = entries[behind]
      if entry.state == 'waiting' then
        room = room + (entry.claim[device] or 0)
      end
    end
    return room
  end
end

local function take_from(entry, device, mib)
  local claim = {}
  for name, got in pairs(entry.claim) do
    claim[name] = got
  end
  claim[device] = claim[device] > mib and claim[device] - mib or nil
  count(entry, claim)
  entry.is_full = nil
  save(entry)
end

local function reserve(entries, number, claim)
  local lease = entries[number]
  for device, mib in pairs(claim) do
    local lacks = mib - (lease.claim[device] or 0) - free(device)
    for behind = #entries, number + 1, -1 do
      local entry = entries[behind]
      local has = entry.state == 'waiting' and entry.claim[device] or 0
      if lacks > 0 and has > 0 then
        take_from(entry, device, math.min(lacks, has))
        lacks = lacks - has
      end
    end
  end
  count(lease, claim)
  lease.is_full = true
  save(lease)
end

-- Give free memory to the leases that can now have all they wait for. None takes a device before a lease ahead of it.
-- Returns the leases that still wait and are first on enough devices, with these devices: { lease, where }.
local function promote()
  local heads, barred = {}, {}
  if in_grace or redis.call('ZCARD', LINE) == 0 then
    return heads
  end
  local entries = line()
  for number, lease in ipairs(entries) do
    if lease.state == 'waiting' and lease.got_to and lease.got_to <= now and not lease.is_full then
      count(lease, {})
      lease.got_to = nil
      save(lease)
    end
    if lease.state == 'waiting' and not lease.is_full and is_possible(lease) then
      local claim = place(lease, room_for(entries, number), barred)
      if claim then
        reserve(entries, number, claim)
      else
        local first_on = {}
        for _, device in ipairs(names) do
          if allows(lease, device) then
            first_on[#first_on + 1] = not barred[device] and device or nil
            barred[device] = true
          end
        end
        if #first_on >= lease.gpus then
          local where =
            { mib = lease.mib, gpus = lease.gpus, shares = lease.shares, devices = table.concat(first_on, ',') }
          heads[#heads + 1] = { lease = lease, where = where }
        end
      end
    end
  end
  return heads
end

-- Memory that was just released goes to the one it was released for, as far as that one needs it.
local function pour(freed, target)
  local claim, gpus = {}, 0
  for device, mib in pairs(target.claim) do
    claim[device], gpus = mib, gpus + 1
  end
  for device, mib in pairs(freed) do
    local wanted = 0
    if target.state == 'pending' then
      wanted = target.want[device] or 0
    elseif target.state == 'waiting' and allows(target, device) and (claim[device] or gpus < target.gpus) then
      wanted = share_of(target, device)
    end
    local share = math.min(mib, wanted - (claim[device] or 0), free(device))
    if share > 0 then
      gpus = claim[device] and gpus or gpus + 1
      claim[device] = (claim[device] or 0) + share
    end
  end
  count(target, claim)
  if target.state == 'waiting' then
    target.got_to = now + PARTIAL_MS
  end
  save(target)
end

-- Making room --------------------------------------------------------------------------------------------------------

-- What it costs this gateway to free memory on one of the devices that would do; nil if it can free none.
local function price(gateway, ask)
  local lowest
  for device, cost in pairs(gateway.prices) do
    if allows(ask, device) and (not lowest or cost < lowest) then
      lowest = cost
    end
  end
  return lowest
end

local function living_gateways()
  local found, flat = {}, redis.call('HGETALL', GATEWAYS)
  for number = 1, #flat, 2 do
    local gateway = cjson.decode(flat[number + 1])
    if gateway.seen + GATEWAY_MS > now then
      found[flat[number]] = gateway
    else
      redis.call('HDEL', GATEWAYS, flat[number])
    end
  end
  return found
end

local function recall(lease)
  lease.recall_at = now + lease.grace_ms
  save(lease)
  changed()
end

-- Preemptible leases of lower priority on these devices, least important and newest first.
local function preemptible_below(ask)
  local found = {}
  for _, id in ipairs(redis.call('HKEYS', LEASES)) do
    local lease = lease_of(id)
    if lease and lease.state == 'held' and lease.preemptible and lease.priority > ask.priority then
      found[#found + 1] = lease
    end
  end
  table.sort(found, function(one, other)
    if one.priority ~= other.priority then
      return one.priority > other.priority
    end
    return tonumber(one.token) > tonumber(other.token)
  end)
  return found
end

-- Recall preemptible leases if that gives the waiting lease all it needs; else none.
local function recall_for(lease, where)
  local candidates = preemptible_below(lease)
  local function room(device)
    local sum = free(device) + (lease.claim[device] or 0)
    for _, candidate in ipairs(candidates) do
      sum = sum + (candidate.claim[device] or 0)
    end
    return sum
  end
  local claim = #candidates > 0 and place(where, room, {})
  for device, mib in pairs(claim or {}) do
    local lacks = mib - free(device) - (lease.claim[device] or 0)
    for _, candidate in ipairs(candidates) do
      local has = candidate.claim[device] or 0
      if lacks > 0 and has > 0 then
        lacks = lacks - has
        if not candidate.recall_at then
          recall(candidate)
        end
      end
    end
  end
end

-- One gateway at a time is asked to make room, the cheapest first; when each has had its turn, holders are recalled and
-- the round begins again.
local function give_turn(lease, where, gateways)
  local at_work = lease.turn and gateways[lease.turn]
  if at_work and now < lease.turn_to and price(at_work, where) then
    return
  end
  lease.tried = lease.tried or {}
  if lease.turn then
    lease.tried[lease.turn] = true
  end
  local best, lowest
  for name, gateway in pairs(gateways) do
    local cost = not lease.tried[name] and price(gateway, where)
    if cost and (not lowest or cost < lowest or (cost == lowest and name < best)) then
      best, lowest = name, cost
    end
  end
  lease.turn, lease.turn_to = best, best and now + TURN_MS
  if not best then
    lease.tried = nil
    recall_for(lease, where)
  end
  save(lease)
end

local function give_turns(heads, gateways)
  for _, head in ipairs(heads) do
    give_turn(head.lease, head.where, gateways)
  end
end

if put_away_what_lapsed() then
  promote()
end
