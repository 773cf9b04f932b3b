//! What every command is asked first, in the order in which the software controller asks: namespace, range, size, write protection.

use crate::{Command, Config, share, status};

/// The namespace of a flush of all namespaces.
const ALL: u32 = u32::MAX;

/// What is wrong with a command; [`status::SUCCESS`]: nothing.
#[inline]
pub fn check(command: &Command, config: &Config) -> u16 {
    let flush = command.is_flush();
    let meant = command.nsid == config.nsid() || (flush && command.nsid == ALL);
    if !config.has(Config::ENABLED) || !meant {
        return status::INVALID_NAMESPACE;
    }
    if flush {
        return status::SUCCESS;
    }
    if !share::contains(command, config) {
        return status::LBA_OUT_OF_RANGE;
    }
    // MDTS is 128 KiB.
    let most_z = if config.large_blocks() { 31 } else { 255 };
    if command.moves_data() && command.nlb_z > most_z {
        return status::INVALID_FIELD;
    }
    if config.has(Config::READ_ONLY) && !command.only_reads() {
        return status::READ_ONLY;
    }
    status::SUCCESS
}
