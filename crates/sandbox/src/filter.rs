//! Lists of calls as programs of the kernel's.

use std::{collections::BTreeMap, fmt, sync::Arc};

use rustix::process::getpid;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter, apply_filter_all_threads,
};

use crate::calls::{CONTROL, Call, OLDER, SHARD, When};

/// Why a filter is not in force.
pub(crate) type FilterError = seccompiler::Error;

/// The list of calls that shards have, ready to be put on one.
#[derive(Clone)]
pub struct ShardFilter(Arc<BpfProgram>);

impl fmt::Debug for ShardFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShardFilter").field(&SHARD.len()).finish()
    }
}

impl ShardFilter {
    pub(crate) fn new() -> Result<Self, FilterError> {
        Ok(Self(Arc::new(program(&[SHARD])?)))
    }

    /// Puts the calling thread under the list, for good.
    ///
    /// # Errors
    /// What the system said.
    pub fn apply(&self) -> Result<(), String> {
        apply_filter(&self.0).map_err(|error| error.to_string())
    }
}

/// Puts all threads of the process under the list of control.
pub(crate) fn close() -> Result<(), FilterError> {
    // What the C library does without this call is clone, whose flags can be seen.
    let no_clone3 = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        arch()?,
    )?;
    apply_filter_all_threads(&BpfProgram::try_from(no_clone3)?)?;
    apply_filter_all_threads(&program(&[SHARD, CONTROL, OLDER])?)
}

fn arch() -> Result<seccompiler::TargetArch, BackendError> {
    std::env::consts::ARCH.try_into()
}

fn program(lists: &[&[Call]]) -> Result<BpfProgram, BackendError> {
    let rules = lists.iter().copied().flatten().map(|call| Ok((call.number, rules(call.when)?)));
    let rules = rules.collect::<Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError>>()?;
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, arch()?)?.try_into()
}

/// A call is allowed when one of these holds, or when there is none.
fn rules(when: When) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |arg, len, op, value| SeccompRule::new(vec![SeccompCondition::new(arg, len, op, value)?]);
    let number = |arg, op, value: u32| rule(arg, SeccompCmpArgLen::Dword, op, u64::from(value));
    match when {
        When::Always => Ok(Vec::new()),
        When::Bits(arg, mask, value) => {
            let op = SeccompCmpOp::MaskedEq(u64::from(mask.cast_unsigned()));
            Ok(vec![number(arg, op, value.cast_unsigned())?])
        }
        When::Among(arg, values) => values.iter().map(|value| number(arg, SeccompCmpOp::Eq, *value)).collect(),
        When::Null(arg) => Ok(vec![rule(arg, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?]),
        When::OwnProcess(arg) => Ok(vec![number(arg, SeccompCmpOp::Eq, getpid().as_raw_pid().cast_unsigned())?]),
    }
}
