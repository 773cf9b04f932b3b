//! Lists of calls as programs of the kernel's.

use std::collections::BTreeMap;

use rustix::process::getpid;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};

use crate::{
    calls::{ABSENT, BROKER, CONTROL, Call, SHARD, When},
    forms::{FORMS, REFUSED},
};

/// Why a filter is not in force.
pub(crate) type FilterError = seccompiler::Error;

/// What threads of a worker get, each the first and one of the others.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) absent: BpfProgram,
    pub(crate) shard: BpfProgram,
    pub(crate) other: BpfProgram,
}

impl Programs {
    pub(crate) fn new() -> Result<Self, FilterError> {
        Ok(Self {
            absent: absent()?,
            shard: allowing([SHARD, ABSENT].into_iter().flatten().copied(), SeccompAction::Trap)?,
            other: allowing([SHARD, CONTROL, ABSENT].into_iter().flatten().copied(), SeccompAction::Trap)?,
        })
    }
}

/// Whether the system can have a thread told of calls that are not on its list.
pub(crate) fn is_possible() -> bool {
    const GET_ACTION_AVAIL: libc::c_uint = 2;
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: the call reads a number from the place given.
    unsafe { libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

/// Puts the broker, which has one thread, under its list. What is not there fails.
pub(crate) fn confine_broker() -> Result<(), FilterError> {
    apply_filter(&absent()?)?;
    let forms = FORMS.iter().map(|form| Call { number: form.number, when: form.when });
    let all = forms.chain([BROKER, ABSENT].into_iter().flatten().copied());
    apply_filter(&allowing(all, SeccompAction::Errno(REFUSED.unsigned_abs()))?)
}

/// What there is not, says the kernel; all else is for the other list to say.
fn absent() -> Result<BpfProgram, BackendError> {
    let calls = ABSENT.iter().map(|call| (call.number, Vec::new())).collect();
    let no_such_call = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    SeccompFilter::new(calls, SeccompAction::Allow, no_such_call, arch()?)?.try_into()
}

fn arch() -> Result<seccompiler::TargetArch, BackendError> {
    std::env::consts::ARCH.try_into()
}

fn allowing(calls: impl Iterator<Item = Call>, otherwise: SeccompAction) -> Result<BpfProgram, BackendError> {
    let rules = calls.map(|call| Ok((call.number, rules(call.when)?)));
    let rules = rules.collect::<Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError>>()?;
    SeccompFilter::new(rules, otherwise, SeccompAction::Allow, arch()?)?.try_into()
}

/// A call is allowed when one of these holds, or when there is none.
fn rules(when: When) -> Result<Vec<SeccompRule>, BackendError> {
    let condition = |arg, op, value: u32| SeccompCondition::new(arg, SeccompCmpArgLen::Dword, op, u64::from(value));
    let number = |arg, op, value: u32| SeccompRule::new(vec![condition(arg, op, value)?]);
    match when {
        When::Always => Ok(Vec::new()),
        When::Bits(arg, mask, value) => {
            let op = SeccompCmpOp::MaskedEq(u64::from(mask.cast_unsigned()));
            Ok(vec![number(arg, op, value.cast_unsigned())?])
        }
        When::Among(arg, values) => values.iter().map(|value| number(arg, SeccompCmpOp::Eq, *value)).collect(),
        When::Null(arg) => {
            let null = SeccompCondition::new(arg, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
            Ok(vec![SeccompRule::new(vec![null])?])
        }
        When::Option(options) => {
            let own = || condition(1, SeccompCmpOp::Eq, libc::SOL_SOCKET.cast_unsigned());
            let rule = |option: &u32| SeccompRule::new(vec![own()?, condition(2, SeccompCmpOp::Eq, *option)?]);
            options.iter().map(rule).collect()
        }
        When::OwnProcess(arg) => Ok(vec![number(arg, SeccompCmpOp::Eq, getpid().as_raw_pid().cast_unsigned())?]),
    }
}
