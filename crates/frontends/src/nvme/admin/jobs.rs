//! Work on namespaces that takes longer than a turn: it waits for commands in flight, then for the host.
//!
//! ```text
//!   command ─► Job ─ wait until nothing is in flight ─► Host ─ another thread ─► task ─► Inbox ─► Job ─► completion
//! ```
//!
//! A reset of the controller takes back what the host was not asked for yet. What it was asked for it does, so that such a job
//! outlives the reset: only its command is forgotten.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use millrace_block::BlockSize;
use millrace_engine::{Launch, ShardContext, remote};
use millrace_nvme_spec::status::Status;

use super::super::{
    controller::{CommandToken, Controller},
    namespace::{Allocated, Attached, HostReply, Namespace, NewFormat},
    status::Completion,
};

/// What the host answered.
enum Answer {
    Created(Result<Arc<Namespace>, Status>),
    Done(Result<(), Status>),
}

/// Where tasks leave the answers for the controller's turn, by the job's number.
type Inbox = RefCell<Vec<(u64, Answer)>>;

/// What a job is for.
#[derive(Clone)]
pub(super) enum Work {
    /// A namespace is being created.
    Create { nsid: u32, bytes: u64, block_size: BlockSize },
    /// Namespaces are deleted one after the other, the last of the list first.
    Delete { nsids: Vec<u32> },
    /// A namespace was detached.
    Detach { nsid: u32 },
    /// A namespace is erased and gets a format.
    Format { attached: Rc<Attached>, format: NewFormat },
}

impl Work {
    fn concerns(&self, wanted: u32) -> bool {
        match self {
            Self::Create { nsid, .. } | Self::Detach { nsid } => *nsid == wanted,
            Self::Format { attached, .. } => attached.nsid == wanted,
            Self::Delete { nsids } => nsids.contains(&wanted),
        }
    }
}

struct Job {
    number: u64,
    /// The command to complete; `None` after a reset.
    token: Option<CommandToken>,
    work: Work,
    /// Nothing may be in flight on these when the host is asked.
    drain: Vec<Rc<Attached>>,
    /// The host was asked.
    asked: bool,
    /// What is made by it the operator has taken away already.
    withdrawn: bool,
}

/// All jobs of a controller.
#[derive(Default)]
pub(super) struct Jobs {
    list: Vec<Job>,
    inbox: Rc<Inbox>,
    count: u64,
}

impl Jobs {
    /// Commands that wait for jobs.
    pub(super) fn tokens(&self) -> impl Iterator<Item = CommandToken> {
        self.list.iter().filter_map(|job| job.token)
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether an answer is there that no turn has seen.
    pub(super) fn has_answers(&self) -> bool {
        !self.inbox.borrow().is_empty()
    }

    /// Whether there are jobs for which the host was not asked yet.
    pub(super) fn has_unasked(&self) -> bool {
        self.list.iter().any(|job| !job.asked)
    }

    /// The controller was reset: nobody waits any more. Returns the jobs that nobody was asked for, and never will be.
    fn reset(&mut self) -> Vec<Job> {
        self.list.iter_mut().for_each(|job| job.token = None);
        self.list.extract_if(.., |job| !job.asked).collect()
    }

    /// Whether a namespace has a job under way.
    pub(super) fn concern(&self, nsid: u32) -> bool {
        self.list.iter().any(|job| job.work.concerns(nsid))
    }

    /// Whether the host was asked to format a namespace: this one, and not what was shown under its identifier before.
    fn erase(&self, of: &Attached) -> bool {
        self.list
            .iter()
            .any(|job| job.asked && matches!(&job.work, Work::Format { attached, .. } if attached.is_of(&of.namespace)))
    }

    /// Bytes of namespaces that are being created.
    pub(super) fn bytes_in_creation(&self) -> u64 {
        let bytes = |job: &Job| if let Work::Create { bytes, .. } = job.work { bytes } else { 0 };
        self.list.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Begins a job for a command.
    pub(super) fn push(&mut self, token: CommandToken, work: Work, drain: Vec<Rc<Attached>>) {
        let number = self.count;
        self.count += 1;
        self.list.push(Job { number, token: Some(token), work, drain, asked: false, withdrawn: false });
    }

    /// Has a task wait for the host's answer. `false`: no task is free, and nothing was asked.
    fn launch<T: Send + 'static>(
        &self,
        cx: &ShardContext<'_>,
        number: u64,
        wrap: fn(Result<T, Status>) -> Answer,
        ask: impl FnOnce(HostReply<T>),
    ) -> bool {
        let Some(slot) = cx.reserve() else { return false };
        let (reply, answer) = remote(cx);
        ask(reply);
        let inbox = Rc::clone(&self.inbox);
        let waits = async move {
            // A host that goes without an answer has not done it.
            let result = answer.await.unwrap_or(Err(Status::INTERNAL_ERROR));
            inbox.borrow_mut().push((number, wrap(result)));
        };
        let _ = slot.run(|tcx| Launch::<()>::Wait(tcx.scratch.place_future(waits)));
        true
    }
}

impl Controller {
    /// The controller is reset: namespaces for which the host was not asked yet are what they were before the command.
    pub(super) fn reset_jobs(&mut self) {
        for job in self.admin.jobs.reset() {
            self.take_back(job);
        }
    }

    /// What the host was not asked for yet it never will be.
    fn take_back(&mut self, job: Job) {
        match job.work {
            Work::Create { nsid, .. } => self.namespaces.unreserve(nsid),
            Work::Delete { nsids } => {
                for attached in job.drain.iter().filter(|attached| nsids.contains(&attached.nsid)) {
                    let there = self.namespaces.allocation(attached.nsid);
                    // The operator may have taken it meanwhile, or attached it himself.
                    if there.is_some_and(|there| Arc::ptr_eq(&there.namespace, &attached.namespace)) {
                        let _ = self.namespaces.attach(attached.nsid);
                    }
                }
            }
            // It is detached, and the host knows.
            Work::Detach { .. } => {}
            Work::Format { attached, .. } => self.shown_as(&attached).formatting.set(false),
        }
    }

    /// Whether a namespace's volume is being formatted, and takes no requests. Before the host was asked for it, the format waits for whatever
    /// is in flight, and a reset may call it off.
    pub(crate) fn erases(&self, attached: &Attached) -> bool {
        self.admin.jobs.erase(attached)
    }

    /// Does what the host's answers are for. Returns work done.
    pub(crate) fn take_answers(&mut self) -> usize {
        let answers = self.admin.jobs.inbox.take();
        let work = answers.len();
        for (number, answer) in answers {
            self.answered(number, answer);
        }
        work
    }

    /// The operator takes a namespace away that is being created for the guest, of which the device does not know yet. Whether there is one.
    pub(crate) fn withdraw_creation(&mut self, wanted: u32) -> bool {
        let mut jobs = self.admin.jobs.list.iter_mut();
        let creation = jobs.find(|job| job.asked && matches!(job.work, Work::Create { nsid, .. } if nsid == wanted));
        creation.map(|job| job.withdrawn = true).is_some()
    }

    /// Goes on with every job that can. Returns work done.
    pub(super) fn run_jobs(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if self.admin.jobs.list.is_empty() {
            return 0;
        }
        let mut work = self.take_answers();
        let mut at = 0;
        while let Some(job) = self.admin.jobs.list.get(at) {
            let drained = job.drain.iter().all(|attached| attached.in_flight.get() == 0);
            if !job.asked && drained {
                work += 1;
                let Some(asked) = self.ask_host(cx, &job.work, job.number) else {
                    // The next job is in this one's place then.
                    self.finish_job(at, Completion::SUCCESS);
                    continue;
                };
                self.admin.jobs.list[at].asked = asked;
            }
            at += 1;
        }
        work
    }

    /// Asks the host for a job's next step; `None`: there is none. `false`: no task is free to wait for the answer; ask later.
    fn ask_host(&self, cx: &ShardContext<'_>, work: &Work, number: u64) -> Option<bool> {
        let (host, device) = (&self.host, self.config.name.as_str());
        let jobs = &self.admin.jobs;
        match work {
            Work::Detach { .. } => None,
            &Work::Create { nsid, bytes, block_size } => Some(jobs.launch(cx, number, Answer::Created, |reply| {
                host.create_namespace(device, nsid, bytes, block_size, reply);
            })),
            Work::Delete { nsids } => {
                let &nsid = nsids.last()?;
                Some(jobs.launch(cx, number, Answer::Done, |reply| {
                    // Not before: a reset, or a death in it, takes back what nobody was asked for.
                    self.note_attached(nsid, false);
                    host.delete_namespace(device, nsid, reply);
                }))
            }
            Work::Format { attached, format } => {
                let namespace = Arc::clone(&attached.namespace);
                Some(jobs.launch(cx, number, Answer::Done, |reply| host.format(device, namespace, *format, reply)))
            }
        }
    }

    /// The host has answered: does to the controller what the job is for.
    fn answered(&mut self, number: u64, answer: Answer) {
        let at = self.admin.jobs.list.iter().position(|job| job.number == number).expect("a job waits for its answer");
        let Job { work, withdrawn, .. } = &self.admin.jobs.list[at];
        let (work, withdrawn) = (work.clone(), *withdrawn);
        let result = match (work, answer) {
            (Work::Create { nsid, .. }, Answer::Created(namespace)) => {
                let withdrawn = if withdrawn { Err(Status::INTERNAL_ERROR) } else { Ok(()) };
                self.created(nsid, withdrawn.and(namespace))
            }
            (Work::Delete { nsids }, Answer::Done(Ok(()))) => {
                self.deleted(nsids.last().copied());
                let job = &mut self.admin.jobs.list[at];
                if let Work::Delete { nsids } = &mut job.work {
                    nsids.pop();
                }
                // The next one's turn, or the end.
                job.asked = false;
                if job.token.is_none() {
                    let job = self.admin.jobs.list.remove(at);
                    self.take_back(job);
                }
                return;
            }
            (Work::Format { attached, .. }, Answer::Done(result)) => {
                formatted(&self.shown_as(&attached), result);
                result.map(|()| 0)
            }
            (Work::Delete { nsids }, Answer::Done(Err(status))) => {
                // Those whose turn never comes stay detached.
                for nsid in nsids {
                    self.note_attached(nsid, false);
                }
                Err(status)
            }
            (_, Answer::Done(result)) => result.map(|()| 0),
            (_, Answer::Created(_)) => unreachable!("only a creation is answered with a namespace"),
        };
        let completion = match result {
            Ok(dw0) => Completion::with_result(dw0),
            Err(status) => Completion::from(Err(status)),
        };
        self.finish_job(at, completion);
    }

    /// What commands of now find of a namespace that a job began with: it may be led to on another way since.
    fn shown_as(&self, attached: &Rc<Attached>) -> Rc<Attached> {
        let now = self.namespaces.get(attached.nsid);
        Rc::clone(now.filter(|now| now.is_of(&attached.namespace)).unwrap_or(attached))
    }

    fn created(&mut self, nsid: u32, namespace: Result<Arc<Namespace>, Status>) -> Result<u32, Status> {
        self.namespaces.unreserve(nsid);
        let allocated = Allocated { namespace: namespace?, read_only: false, by_guest: true };
        self.namespaces.allocate(nsid, allocated)?;
        // Whatever is left of an attachment that was not stored.
        self.note_attached(nsid, false);
        Ok(nsid)
    }

    fn deleted(&mut self, nsid: Option<u32>) {
        let ours = nsid.filter(|&nsid| self.namespaces.allocation(nsid).is_some_and(|allocated| allocated.by_guest));
        if let Some(nsid) = ours.filter(|&nsid| self.namespaces.get(nsid).is_none()) {
            self.namespaces.release(nsid);
        }
    }

    fn finish_job(&mut self, at: usize, completion: Completion) {
        let job = self.admin.jobs.list.remove(at);
        if let Some(token) = job.token {
            self.complete(token, completion);
        }
    }
}

/// A format has ended, well or not: the volume says what it is now.
fn formatted(attached: &Attached, result: Result<(), Status>) {
    if result.is_ok() {
        attached.namespace.uncorrectable.clear_all();
    }
    attached.geometry.set(attached.namespace.volume.geometry());
    attached.formatting.set(false);
}
