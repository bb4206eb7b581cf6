"""Files of this machine: kept through a power cut, held by one process at a time, as the system lets them be written."""
