//! What every command is asked first, in the order in which the software controller asks: namespace, range, size, write protection.

use crate::{Command, Config, share, status};

/// The namespace of a flush of all namespaces.
const ALL: u32 = u32::MAX;

/// What is wrong with a command; [`status::SUCCESS`]: nothing.
#[inline]
pub fn check(command: &Command, config: &Config) -> u16 {
    let flush = command.is_flush();
    let meant = (command.nsid == config.nsid()) | (flush & (command.nsid == ALL));
    // MDTS is 128 KiB.
    let beyond = if config.large_blocks() { command.nlb_z >> 5 } else { command.nlb_z >> 8 };
    let large = command.moves_data() & (beyond != 0);
    if !(config.has(Config::ENABLED) & meant) {
        status::INVALID_NAMESPACE
    } else if !flush & !share::contains(command, config) {
        status::LBA_OUT_OF_RANGE
    } else if large {
        status::INVALID_FIELD
    } else if config.has(Config::READ_ONLY) & command.changes() {
        status::READ_ONLY
    } else {
        status::SUCCESS
    }
}
