"""Which attention finds a pass key, at which length."""
