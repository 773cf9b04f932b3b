//! The command line as a whole, and as the documentation has it.

use std::{fs, path::Path};

use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::*;

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn help_says_which_transfers_are_possible() {
    let cli = Cli::command();
    let create = cli.find_subcommand("device").and_then(|device| device.find_subcommand("create")).unwrap();
    let mdts = create.get_arguments().find(|argument| argument.get_long() == Some("mdts")).unwrap();
    let possible = format!("a power of two from {} to {}", NvmeSpec::LEAST_MDTS, NvmeSpec::MOST_MDTS);
    assert!(mdts.get_help().unwrap().to_string().contains(&possible));
}

/// The commands in a page: lines of code that begin with the program's name, and those in a sentence.
fn commands(page: &str) -> Vec<String> {
    let page = page.replace("\\\n", " ");
    let lines = page.lines().filter(|line| line.starts_with("    ")).map(str::trim);
    let whole = lines.filter(|line| line.starts_with("millrace ")).map(str::to_owned);
    let quoted = page.split('`').skip(1).step_by(2).filter(|code| code.starts_with("millrace ") && !code.contains('\n'));
    whole.chain(quoted.map(str::to_owned)).collect()
}

/// A command's words as a shell sees them, up to what is no longer its own.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for letter in command.chars().chain([' ']) {
        match (quote, letter) {
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            (None, ' ') if word.is_empty() => {}
            (None, ' ') if ["#", "|", "&", "&&", ">", "…", "..."].contains(&word.as_str()) => return words,
            (None, ' ') => words.push(std::mem::take(&mut word)),
            _ => word.push(letter),
        }
    }
    words
}

#[test]
fn commands_in_the_documentation_are_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["docs", "docs/services", "docs/formats"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let pages = folders.into_iter().flatten().map(|entry| entry.unwrap().path()).chain([root.join("README.md")]);
    let (mut understood, mut wrong) = (0, Vec::new());
    for page in pages.filter(|page| page.extension().is_some_and(|ending| ending == "md")) {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            let words = words(&command);
            // A sentence names a command without saying what it needs, or shows where a name or number goes.
            let shows = |error: &clap::Error| match error.kind() {
                ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
                ErrorKind::InvalidValue => {
                    matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(value)) if value.is_empty())
                }
                ErrorKind::ValueValidation => {
                    command.contains(|letter: char| letter.is_uppercase()) || command.contains("--engine fvm-sim")
                }
                _ => command == "millrace crypt",
            };
            match Cli::try_parse_from(&words) {
                Ok(_) => understood += 1,
                Err(error) if shows(&error) => {}
                Err(error) => wrong.push(format!("{}: {command}\n{error}", page.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(understood > 60, "{understood} commands were found");
}

#[test]
fn what_the_service_manager_runs_is_understood() {
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/millrace.service")).unwrap();
    let setting = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let parse = |line: &str| Cli::try_parse_from(words(line)).unwrap_or_else(|error| panic!("{line}\n{error}"));
    // The directories that it makes are those of the daemon, and of who asks the daemon.
    let directories = ["/run/millrace", "/var/lib/millrace"].map(Path::new);
    assert_eq!((setting("RuntimeDirectory="), setting("StateDirectory=")), ("millrace", "millrace"));
    let start = parse(setting("ExecStart="));
    let Command::Serve(serve) = start.command else { panic!("the daemon is what it starts") };
    assert_eq!([start.global.run_dir(), serve.state_dir()], directories);
    assert_eq!(serve.config.as_deref(), Some(Path::new("/etc/millrace.toml")));
    let reload = parse(setting("ExecReload="));
    assert!(matches!(reload.command, Command::Upgrade(UpgradeArgs { binary: None, show: false, .. })));
    assert_eq!(reload.global.run_dir(), directories[0]);
}
