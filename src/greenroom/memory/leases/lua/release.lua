-- A holder gives its memory back, or a waiter leaves. In the same step the memory goes to the one it was released for:
-- `arg.into`, or the one it was promised to. What is not there, or under another token, stays as it is; so does what
-- others than the call `arg.asker`, which gives up, were told that they hold.
local lease = lease_of(arg.id)
local is_others = lease and arg.asker and lease.state == 'held' and not untold(lease, arg.asker)
local released = lease and not is_others and (not arg.token or arg.token == lease.token) or false
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
