// prepare_gpt.cpp - turn text into shards of tokens, which train_gpt reads fastest
//   prepare_gpt --data FILES --tokenizer PATH OUT.bin
//   prepare_gpt --data FILES --train-tokenizer SIZE FOLDER     first, a tokenizer of your own
//   The same call goes on after a kill. llmc/io/prepare.h says what is read and written.
#include "llmc/extra/kto.h"
#include "llmc/extra/bpe_train.h"
#include "llmc/io/chat.h"
#include "llmc/io/chat_templates.h"
#include "llmc/io/config.h"
#include "llmc/io/dataloader.h"
#include "llmc/io/files.h"
#include "llmc/io/help.h"
#include "llmc/io/prepare.h"
#include "llmc/io/tokenizer.h"
#include "llmc/io/tokenizer_files.h"
#include "llmc/tune/conversations.h"

using namespace llmc;

int main(int argc, char** argv) {
    // Let a write beyond the file size limit fail like one on a full disk, instead of by a signal.
    signal(SIGXFSZ, SIG_IGN);
    setvbuf(stdout, nullptr, _IOLBF, 0);

    // Read the flags, and the one word that is none.
    Config c;
    c.program = &program_named("prepare_gpt");
    or_die(parse_arguments(c, argc, argv));
    std::string page = page_asked(c);
    fputs(page.c_str(), stdout);
    if (!page.empty()) return 0;
    LLMC_USER_CHECK(c.paths.size() == 1, "what is to be written? prepare_gpt --data FILES OUT.bin");
    c.prepare = c.paths[0];

    // Train a tokenizer instead.
    or_die(check_training_flags(c));
    if (c.train_tokenizer) {
        or_die(train_tokenizer(c, program_folder()));
        return 0;
    }

    // Open the tokenizer, and write the shards.
    Tokenizer tokenizer;
    if (c.tokenizer.empty()) c.tokenizer = "byte";
    or_die(tokenizer_open(&tokenizer, c.tokenizer));
    for (const std::string& text : tokenizer.notes)
        fprintf(stderr, "note: %s\n", one_screen(text).c_str());

    // Conversations are written in the chat format of the tokenizer's folder.
    Chat chat;
    std::string folder = file_type(c.tokenizer) == S_IFDIR ? c.tokenizer : "";
    auto open = [&](LineSource* source) {
        LLMC_TRY(choose_chat(&chat, c.chat_format, folder, tokenizer));
        printf("chat format: %s, %s\n", chat.format.name.c_str(), chat.why.c_str());
        std::vector<DataKind> kinds = {conversations(), answer_pairs(), labelled_answers()};
        *source = line_source(chat, c.loss, kinds);
        return std::string();
    };
    or_die(prepare_shards(c, tokenizer, program_folder(), open));
}
