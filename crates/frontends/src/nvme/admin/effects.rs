//! Commands Supported and Effects: the one table of what the dispatchers accept (Base 5.1.12.1.6).

use millrace_nvme_spec::{
    log::{CommandEffects, CommandEffectsLog, SubmissionRestriction},
    opcode::{AdminOpcode, NvmOpcode},
};
use zerocopy::FromZeros;

use super::super::{Config, DoorbellMode};

const SUPPORTED: CommandEffects = CommandEffects::new().with_csupp(true);
/// Logical blocks may change.
const BLOCKS: CommandEffects = SUPPORTED.with_lbcc(true);
/// The set of namespaces may change.
const INVENTORY: CommandEffects = SUPPORTED.with_nic(true);
const FORMAT: CommandEffects = BLOCKS.with_ncc(true).with_cse(SubmissionRestriction::NAMESPACE);

/// Which controllers support an admin command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// The operator lets the guest manage namespaces.
    Quota,
    /// Doorbells arrive as messages.
    Messages,
    /// The I/O queues are no card's.
    Software,
    /// They are a card's.
    Card,
}

const ADMIN: [(AdminOpcode, When, CommandEffects); 15] = [
    (AdminOpcode::DELETE_IO_SQ, When::Always, SUPPORTED),
    (AdminOpcode::CREATE_IO_SQ, When::Always, SUPPORTED),
    (AdminOpcode::GET_LOG_PAGE, When::Always, SUPPORTED),
    (AdminOpcode::DELETE_IO_CQ, When::Always, SUPPORTED),
    (AdminOpcode::CREATE_IO_CQ, When::Always, SUPPORTED),
    (AdminOpcode::IDENTIFY, When::Always, SUPPORTED),
    (AdminOpcode::ABORT, When::Always, SUPPORTED),
    (AdminOpcode::SET_FEATURES, When::Always, SUPPORTED),
    (AdminOpcode::GET_FEATURES, When::Always, SUPPORTED),
    (AdminOpcode::ASYNC_EVENT_REQUEST, When::Always, SUPPORTED),
    (AdminOpcode::NAMESPACE_MANAGEMENT, When::Quota, INVENTORY),
    (AdminOpcode::NAMESPACE_ATTACHMENT, When::Quota, INVENTORY),
    (AdminOpcode::DOORBELL_BUFFER_CONFIG, When::Messages, SUPPORTED),
    (AdminOpcode::FORMAT_NVM, When::Software, FORMAT),
    (AdminOpcode::OPEN_SPACE, When::Card, SUPPORTED),
];

const IO: [(NvmOpcode, CommandEffects); 13] = [
    (NvmOpcode::FLUSH, SUPPORTED),
    (NvmOpcode::WRITE, BLOCKS),
    (NvmOpcode::READ, SUPPORTED),
    (NvmOpcode::WRITE_UNCORRECTABLE, BLOCKS),
    (NvmOpcode::COMPARE, SUPPORTED),
    (NvmOpcode::WRITE_ZEROES, BLOCKS),
    (NvmOpcode::DATASET_MANAGEMENT, BLOCKS),
    (NvmOpcode::VERIFY, SUPPORTED),
    (NvmOpcode::RESERVATION_REGISTER, SUPPORTED),
    (NvmOpcode::RESERVATION_REPORT, SUPPORTED),
    (NvmOpcode::RESERVATION_ACQUIRE, SUPPORTED),
    (NvmOpcode::RESERVATION_RELEASE, SUPPORTED),
    (NvmOpcode::COPY, BLOCKS),
];

/// What a card's engine carries out.
const ENGINE: [NvmOpcode; 5] =
    [NvmOpcode::FLUSH, NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::COMPARE, NvmOpcode::WRITE_ZEROES];

fn is_supported(config: &Config, when: When) -> bool {
    match when {
        When::Always => true,
        When::Quota => config.quota.bytes > 0,
        When::Messages => config.doorbells == DoorbellMode::Messages && config.card.is_none(),
        When::Software => config.card.is_none(),
        When::Card => config.card.is_some(),
    }
}

/// The effects of an admin command; `None` when the controller does not support it.
pub(super) fn admin(config: &Config, opcode: AdminOpcode) -> Option<CommandEffects> {
    let of_opcode = ADMIN.iter().find(|(known, when, _)| *known == opcode && is_supported(config, *when));
    of_opcode.map(|&(_, _, effects)| effects)
}

/// The effects of an I/O command; `None` when the controller does not support it.
#[cfg(test)]
pub(super) fn io(opcode: NvmOpcode) -> Option<CommandEffects> {
    IO.iter().find(|(known, _)| *known == opcode).map(|&(_, effects)| effects)
}

/// The log page.
pub(super) fn log(config: &Config) -> CommandEffectsLog {
    let mut log = CommandEffectsLog::new_zeroed();
    for (opcode, when, effects) in ADMIN {
        if is_supported(config, when) {
            log.admin[usize::from(opcode.0)] = effects;
        }
    }
    for (opcode, effects) in IO.into_iter().filter(|(opcode, _)| config.card.is_none() || ENGINE.contains(opcode)) {
        log.io[usize::from(opcode.0)] = effects;
    }
    log
}
