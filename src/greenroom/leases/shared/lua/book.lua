-- What every operation begins with: the clock, the records, and the arithmetic of memory.
--
-- One book per host, so that all its keys lie in one slot of a cluster and every operation is one script:
--   META      wall, now (ms), last and birth (tokens), version, arrivals
--   LEASES    id → record as JSON        EXPIRY  id by the time at which it lapses
--   USABLE    device → MiB               TAKEN   device → MiB, the sum of all claims
--   LINE      waiting ids in order       GATEWAYS  name → seen, prices
-- A record's `claim` is what is counted in TAKEN: of a held lease all of it, of others what they have got so far.
-- Tokens are text in JSON, because its numbers keep 14 digits only.
local META, LEASES, EXPIRY, USABLE, TAKEN, LINE, GATEWAYS = unpack(KEYS)
local arg = cjson.decode(ARGV[1])
-- Host memory may be claimed by slots, but is never given to a request for GPUs.
local HOST = 'host'
-- So many lapsed leases are put away by one operation; those that follow take the next.
local LAPSES_MAX = 64
-- Who has not been granted anything yet has this one.
local NO_TOKEN = '0'

local function digits(number)
  return string.format('%.0f', number)
end

-- The book's own clock only counts time in which the book was in use, in steps: where Redis stood still, or its wall
-- clock jumped, no holder could renew, and none shall lose its lease for that. It never goes back.
local meta = redis.call('HMGET', META, 'wall', 'now', 'last', 'birth')
local time = redis.call('TIME')
local wall_us = time[1] * 1000000 + time[2]
local wall, now = math.floor(wall_us / 1000), 0
local last, birth = wall_us, wall_us
if meta[1] then
  now = tonumber(meta[2]) + math.max(0, math.min(wall - tonumber(meta[1]), arg.step_ms))
  last, birth = tonumber(meta[3]), tonumber(meta[4])
else
  -- The version starts at the time too, so that a new book is never taken for an earlier one.
  redis.call('HSET', META, 'version', digits(wall_us))
end
-- A new book may replace one that was lost: earlier holders come first.
local in_grace = now < arg.birth_grace_ms
-- Callers know the highest token they have heard of. While nothing has been granted, it is from before the birth.
local floor, last_known_here = tonumber(arg.floor), last
last = math.max(last, floor)
birth = in_grace and math.max(birth, floor) or birth
redis.call('HSET', META, 'wall', digits(wall), 'now', digits(now), 'last', digits(last), 'birth', digits(birth))

local function changed()
  redis.call('HINCRBY', META, 'version', 1)
end

-- Tokens grow with every grant: also where the book is new, the clock went back, or a replica knew less.
local function next_token()
  last = math.max(last + 1, wall_us)
  redis.call('HSET', META, 'last', digits(last))
  return digits(last)
end

-- Records ------------------------------------------------------------------------------------------------------------

local records = {}

local function lease_of(id)
  if records[id] == nil then
    local text = redis.call('HGET', LEASES, id)
    records[id] = text and cjson.decode(text) or false
  end
  return records[id] or nil
end

-- The holder counts its TTL by its own clock, from before it asked. The book waits one step longer, so that a jump of
-- its clock cannot end a lease that its holder still believes in.
local function lapses_at(lease)
  if lease.state == 'pending' then
    return lease.pends_to
  end
  return lease.lives_to + (lease.state == 'held' and math.min(arg.step_ms, math.floor(lease.ttl_ms / 3)) or 0)
end

local function save(lease)
  records[lease.id] = lease
  redis.call('HSET', LEASES, lease.id, cjson.encode(lease))
  redis.call('ZADD', EXPIRY, lapses_at(lease), lease.id)
end

-- Memory -------------------------------------------------------------------------------------------------------------

local usable, taken, names

local function numbers(key)
  local found, flat = {}, redis.call('HGETALL', key)
  for place = 1, #flat, 2 do
    found[flat[place]] = tonumber(flat[place + 1])
  end
  return found
end

local function look()
  if usable then
    return
  end
  usable, taken, names = numbers(USABLE), numbers(TAKEN), {}
  for name in pairs(usable) do
    names[#names + 1] = name
  end
  table.sort(names)
end

local function free(device)
  look()
  return (usable[device] or 0) - (taken[device] or 0)
end

-- From now on this lease counts with this claim.
local function count(lease, claim)
  look()
  local function add(device, mib)
    if mib ~= 0 then
      taken[device] = (taken[device] or 0) + mib
      redis.call('HINCRBY', TAKEN, device, mib)
    end
  end
  for device, mib in pairs(claim) do
    add(device, mib - (lease.claim[device] or 0))
  end
  for device, mib in pairs(lease.claim) do
    if not claim[device] then
      add(device, -mib)
    end
  end
  lease.claim = claim
end

-- Whether the lease can have this claim, with what it already has and what is free.
local function fits(claim, has)
  for device, mib in pairs(claim) do
    local had = has[device] or 0
    -- Less than before always fits, also where others have used up the device since.
    if mib > had and mib > had + free(device) then
      return false
    end
  end
  return true
end

-- Endings and beginnings ---------------------------------------------------------------------------------------------

local function forget(lease)
  count(lease, {})
  records[lease.id] = false
  redis.call('HDEL', LEASES, lease.id)
  redis.call('ZREM', EXPIRY, lease.id)
  redis.call('ZREM', LINE, lease.id)
  changed()
end

local function grant(lease, claim)
  if lease.state ~= 'held' then
    lease.token = lease.was == 'held' and lease.token or next_token()
  end
  count(lease, claim)
  lease.state, lease.lives_to = 'held', now + lease.ttl_ms
  lease.was, lease.kept, lease.want, lease.pends_to = nil, nil, nil, nil
  lease.is_full, lease.got_to, lease.turn, lease.turn_to, lease.tried = nil, nil, nil, nil, nil
  redis.call('ZREM', LINE, lease.id)
  save(lease)
  changed()
end

-- A plan that was not carried out in time: its lease is again what it was before, or nothing.
local function lapse(lease)
  local is_plan = lease.state == 'pending' and lease.was
  lease.state = is_plan and lease.was or lease.state
  if not is_plan or lapses_at(lease) <= now then
    return forget(lease)
  end
  count(lease, lease.kept or {})
  lease.was, lease.kept, lease.want, lease.pends_to = nil, nil, nil, nil
  save(lease)
  changed()
end

local function put_away_what_lapsed()
  local due = redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now, 'LIMIT', 0, LAPSES_MAX)
  for _, id in ipairs(due) do
    lapse(lease_of(id) or { id = id, claim = {} })
  end
  return #due > 0
end

-- Answers ------------------------------------------------------------------------------------------------------------

local function granted(lease)
  return cjson.encode({ lease = lease, now = now, last = digits(last) })
end

local function denied(why)
  look()
  local room, most = {}, {}
  for _, name in ipairs(names) do
    room[name], most[name] = free(name), usable[name]
  end
  return cjson.encode({ denied = why, now = now, last = digits(last), free = room, usable = most })
end
