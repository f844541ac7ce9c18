-- Everything that is held, pending or waited for.
local found = {}
for _, text in ipairs(redis.call('HVALS', LEASES)) do
  local lease = cjson.decode(text)
  found[lease.id] = lease
end
return cjson.encode({ leases = found, now = now, last = digits(last) })
