-- Ask a preemptible holder to leave; it has the time that it named itself. Asking twice gives no more time.
local lease = lease_of(arg.id)
if lease and lease.state == 'held' and lease.preemptible and not lease.recall_at then
  recall(lease)
end
return lease and granted(lease) or cjson.encode({ now = now, last = digits(last) })
