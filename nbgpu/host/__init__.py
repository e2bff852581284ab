"""Operations on a cluster's processes on the host where they run, and the checks of that host. The client
reaches the processes through one protocol, `Host`."""
