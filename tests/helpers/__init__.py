"""What tests share: fabricated plans and runs, servers, hubs, browsers."""
