"""Everything that is stored: all SQL, and every file of FLASH_HOME."""
