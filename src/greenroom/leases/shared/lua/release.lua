-- A holder gives its memory back, or a waiter leaves. In the same step the memory goes to the one it was released for:
-- `arg.into`, or the one it was promised to. What is not there, of another kind, or under another token stays as it is.
-- A call `arg.asker` that gives up takes nothing that others were told they hold, nor another ask's place in the line.
local lease = lease_of(arg.id)
local released = false
if lease and arg.asker and lease.state == 'held' then
  released = untold(lease, arg.asker)
elseif lease and arg.asker then
  released = arg.lease ~= nil and is_of(lease, arg.lease)
elseif lease then
  released = lease.kind == arg.kind and (not arg.token or arg.token == lease.token)
end
if released then
  local freed, into = lease.claim, arg.into or lease.into
  forget(lease)
  local target = into and lease_of(into)
  if target and target.state ~= 'held' then
    pour(freed, target)
  end
  promote()
end
return cjson.encode({ released = released, now = now, last = digits(last) })
