-- A holder gives its memory back, or a waiter leaves. In the same step the memory goes to the one it was released for:
-- `arg.into`, or the one it was promised to. What is not there, or under another token, stays as it is.
local lease = lease_of(arg.id)
if lease and (not arg.token or arg.token == lease.token) then
  local freed, into = lease.claim, arg.into or lease.into
  forget(lease)
  local target = into and lease_of(into)
  if target and target.state ~= 'held' then
    pour(freed, target)
  end
  promote()
end
return cjson.encode({ now = now, last = digits(last) })
