"""A lease store that several gateways share: Redis or Valkey. Imported only where one is configured."""
